"""Models as pure functions, each with its analytic kernel where it has one."""

from fedtangent._src.kernels.features import kernel_features
from fedtangent._src.models.convolutional import cnn, max_pool
from fedtangent._src.models.dense import logistic, mlp
from fedtangent._src.models.entry import build
from fedtangent._src.models.features import linear, rbf_linear
from fedtangent._src.models.flax_networks import from_flax
from fedtangent._src.models.gemm import gemm_convolution
from fedtangent._src.models.linear_networks import deep_linear
from fedtangent._src.models.linearised import linearised
from fedtangent._src.models.mobile import mobilenet_v2, shufflenet_v2
from fedtangent._src.models.ntk_images import ntk_cnn, ntk_resnet, ntk_transformer
from fedtangent._src.models.recurrent import lstm
from fedtangent._src.models.residual import resnet18, resnet34
from fedtangent._src.models.stax_networks import from_stax
from fedtangent._src.models.trainable import LowRank, lora, trainable
from fedtangent._src.models.two_layer import two_layer_relu

__all__ = [
    "LowRank",
    "build",
    "cnn",
    "deep_linear",
    "from_flax",
    "from_stax",
    "gemm_convolution",
    "kernel_features",
    "linear",
    "linearised",
    "logistic",
    "lora",
    "lstm",
    "max_pool",
    "mlp",
    "mobilenet_v2",
    "ntk_cnn",
    "ntk_resnet",
    "ntk_transformer",
    "rbf_linear",
    "resnet18",
    "resnet34",
    "shufflenet_v2",
    "trainable",
    "two_layer_relu",
]
