"""Options of ``fedtangent train``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TrainOptions:
    """One federated run: data, partition, model, algorithm. `fedtangent list` names the choices."""

    algorithm: str = "fed_avg"
    """fed_avg, fed_ensemble, ntk_fl, .. (`fedtangent list algorithms`)."""
    base: str = "fed_avg"
    """fed_ensemble, random_walk, data_sharing: the algorithm inside."""
    dataset: str = "digits"
    """digits, sine, mnist, fashion_mnist, femnist_digits or cifar10."""
    partition: str = "dirichlet"
    """iid, shards, classes, dirichlet, by_user or quantity_skew."""
    model: str = "mlp"
    """mlp, logistic, cnn or rbf_linear."""
    num_rounds: int = 50
    """Communication rounds R."""
    num_clients: int = 20
    """Clients N (by_user: as many as users)."""
    alpha: float = 0.5
    """Dirichlet concentration: smaller is more heterogeneous."""
    min_client_size: int = 1
    """Fewest examples of a client."""
    shards_per_client: int = 2
    """Shards of a client, for the partition shards."""
    classes_per_client: int = 2
    """Classes of a client, for the partition classes."""
    num_train: int | None = None
    """Use only the first so many training examples."""
    schedule: str = "default"
    """all, uniform, poisson, permutations, mixed, strata, random, random_walk, own; default: the algorithm's own."""
    num_models: int = 5
    """Models K of the ensemble (not with the schedules uniform, poisson and own)."""
    clients_per_round: int | None = None
    """Cohort of the schedules uniform and poisson (default: everyone)."""
    num_strata: int = 5
    """Strata Q of the schedule strata."""
    clients_per_stratum: int | None = None
    """Clients drawn from each stratum (default: all of it)."""
    widths: tuple[int, ...] = (128,)
    """Hidden widths of the mlp."""
    activation: str = "relu"
    """Activation of the mlp."""
    parameterization: str = "ntk"
    """ntk or standard parameterisation of the mlp."""
    loss: str = "squared_error"
    """squared_error (classes as centred one-hot targets) or cross_entropy."""
    client_learning_rate: float = 1.0
    """Step size of the clients; of the evolution, for ntk_fl."""
    client_optimizer: str = "sgd"
    """sgd, momentum (0.9) or adam; its state does not outlive a round."""
    server_learning_rate: float | None = None
    """Step size of the server (default: 1, or the algorithm's own)."""
    decay: float = 1.0
    """The clients' step size is multiplied by this every --decay-every rounds (the papers: 0.99)."""
    decay_every: int = 10
    """Rounds between decays."""
    dropout: float = 0.0
    """Probability that a client drops out of a round: it receives the model and sends nothing."""
    keep_first: int | None = None
    """Close a round after so many answers (--clients-per-round 130 --keep-first 100)."""
    completion_time: str = "lognormal"
    """keep_first: lognormal or exponential times, in proportion to a client's examples."""
    completion_spread: float = 1.0
    """keep_first: standard deviation of the logarithm of a lognormal time."""
    max_update_norm: float | None = None
    """Reject updates that are not finite or of a larger norm (inf: only the former)."""
    local_steps: int | None = None
    """Local steps T (give this or --local-epochs)."""
    local_epochs: int | None = None
    """Local epochs (default: 5, unless --local-steps is given)."""
    batch_size: int = 16
    """Minibatch size; 0 for full batches."""
    weighting: str | None = None
    """Weigh clients by examples or uniformly: examples, uniform (default: examples, or the algorithm's own)."""
    channel: str = "lossless"
    """How updates travel: lossless, top_k:<share>, random_k:<share>, qsgd:<bits>, quantise:<bits>."""
    error_feedback: bool = False
    """A client adds to its next update what the channel left out of this one."""
    beta: float = 1.0
    """Share of its examples that a client uses in a round, drawn anew in each."""
    projection: int | None = None
    """Project inputs to so many numbers with a Gaussian matrix, whose secret seed a key server hands to the clients."""
    key_file: Path | None = None
    """projection: where the secret seed is kept, for you alone; made if absent (default: $FEDTANGENT_KEY_FILE)."""
    sparsity: float = 0.0
    """Share of the numbers sent that is set to zero, the smallest: of each example's Jacobian, or of an update."""
    shuffle: bool = False
    """A shuffling server permutes what clients send, so that the server does not know who sent what."""
    secure_aggregation: bool = False
    """Clients send masked 32-bit numbers, of which the server learns the sum only (not with Jacobians)."""
    mu: float = 0.1
    """fed_prox, ditto: strength of the proximal term (Ditto's lambda)."""
    nova_mu: float = 0.0
    """fed_nova: strength of the proximal term."""
    dyn_alpha: float = 0.1
    """fed_dyn: alpha, the strength of the regulariser."""
    server_momentum: float = 0.9
    """fed_avg_m."""
    beta_1: float = 0.9
    """fed_adam, fed_yogi."""
    beta_2: float = 0.99
    """fed_adam, fed_yogi."""
    tau: float = 1e-3
    """fed_adam, fed_yogi, fed_adagrad: degree of adaptivity."""
    bits: int = 8
    """fed_com, fed_paq: bits of a number."""
    clip_norm: float = 1.0
    """dp_fed_avg: bound on the norm of an update."""
    noise_multiplier: float = 1.0
    """dp_fed_avg: noise on the sum of the updates, in units of the bound."""
    delta: float = 1e-5
    """dp_fed_avg: delta that the final epsilon is told for."""
    private: str = "^0/"
    """lg_fed_avg: regular expression; parameters whose path matches it stay with their client."""
    graph: str = "ring"
    """random_walk, gossip: ring, torus, complete or erdos_renyi:<probability>."""
    shared_fraction: float = 0.1
    """data_sharing: share of all examples that every client holds."""
    server_examples: int = 100
    """fed_be (without labels), --ntk-choose validation: training examples that the server holds, and no client does."""
    posterior: str = "gaussian"
    """fed_be: gaussian or dirichlet."""
    num_samples: int = 10
    """fed_be: models drawn from the posterior."""
    client_test: float = 0.0
    """Share of each client's examples kept to test what it predicts for itself (personal models, if it has any)."""
    ntk_kernel: str = "averaged"
    """ntk_fl: averaged (the paper's H for all outputs) or exact."""
    ntk_times: tuple[int, ...] = tuple(range(100, 2001, 100))
    """ntk_fl: candidate numbers of gradient steps."""
    ntk_method: str = "auto"
    """ntk_fl: auto (the cheapest), eigh, chebyshev or iterate; all give the same."""
    ntk_choose: str = "training"
    """ntk_fl: the number of steps by the round's training examples, or by validation on --server-examples."""
    ntk_criterion: str = "loss"
    """ntk_fl: choose the number of steps by loss or accuracy."""
    ntk_patience: int | None = None
    """ntk_fl: stop looking once the criterion got worse so many candidates in a row (default: look at all)."""
    ntk_unstable: str = "stop"
    """ntk_fl, a step size above the largest stable one: stop, clip (take 0.9 of that) or allow."""
    evaluate_every: int = 5
    """Rounds between evaluations."""
    diagnostics: str = "none"
    """none, or kernel: the models' tangent kernels at every evaluation (drift, alignment, spectrum, commutators)."""
    diagnostics_examples: int = 256
    """diagnostics: training examples that kernels are measured on, drawn from every client."""
    checkpoint_every: int | None = None
    """Rounds between checkpoints; 0: none. Default: every ten seconds at most (less often where they take long)."""
    resume: bool = False
    """Continue from the newest good checkpoint in OUTPUT; --num-rounds may have grown."""
    stop_on_divergence: bool = True
    """End at the last good round when the model's numbers are no longer finite (costs a second copy of the state)."""
    mapping: str = "auto"
    """How clients are mapped onto the devices: auto, scan, vmap, chunked:<n>, sharded, sharded:<one of these>."""
    host_devices: int = 0
    """Without an accelerator: cores that work side by side, each on its own clients (0: all of them)."""
    distributed: bool = False
    """One of several processes of one run: started alike on every host, over a shared output folder."""
    coordinator: str | None = None
    """distributed: host:port of process 0 (default: $JAX_COORDINATOR_ADDRESS, or the cluster's own variables)."""
    num_processes: int | None = None
    """distributed: how many there are (default: $JAX_NUM_PROCESSES, or the cluster's)."""
    process_id: int | None = None
    """distributed: which one this is, from 0 (default: $JAX_PROCESS_ID, or the cluster's)."""
    seed: int = 0
    """Seed of everything."""
    seeds: str | None = None
    """Several runs, as 0:10 or 0,3,7: other initialisations and cohorts; data and clients stay those of --seed."""
    output: Path = Path("results/train")
    """Folder for config.json, metrics.csv, result.json, figures/ and checkpoints/."""
    data_dir: Path | None = None
    """Folder with original data files (default: $FEDTANGENT_DATA)."""
