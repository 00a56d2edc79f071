"""The papers behind the algorithms, by key, as BibTeX: ``print(fedtangent.cite(algorithm))``.

An algorithm's entry names its papers by these keys, or gives BibTeX for a paper that is not here.
"""

from __future__ import annotations

from fedtangent._src.entries import catalogue
from fedtangent._src.types import Algorithm

PAPERS: dict[str, str] = {
    "mcmahan2017": """@inproceedings{mcmahan2017,
  title = {Communication-Efficient Learning of Deep Networks from Decentralized Data},
  author = {McMahan, H. Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth and Ag{\\"u}era y Arcas, Blaise},
  booktitle = {International Conference on Artificial Intelligence and Statistics},
  year = {2017},
}""",
    "shi2021": """@article{shi2021,
  title = {Fed-ensemble: Improving Generalization through Model Ensembling in Federated Learning},
  author = {Shi, Naichen and Lai, Fan and Al Kontar, Raed and Chowdhury, Mosharaf},
  journal = {arXiv preprint arXiv:2107.10663},
  year = {2021},
}""",
    "shi2024": """@article{shi2024,
  title = {Fed-ensemble: Ensemble Models in Federated Learning for Improved Generalization and Uncertainty
    Quantification},
  author = {Shi, Naichen and Lai, Fan and Al Kontar, Raed and Chowdhury, Mosharaf},
  journal = {IEEE Transactions on Automation Science and Engineering},
  year = {2024},
}""",
    "yue2022": """@inproceedings{yue2022,
  title = {Neural Tangent Kernel Empowered Federated Learning},
  author = {Yue, Kai and Jin, Richeng and Pilgrim, Ryan and Wong, Chau-Wai and Baron, Dror and Dai, Huaiyu},
  booktitle = {International Conference on Machine Learning},
  year = {2022},
}""",
    "li2020": """@inproceedings{li2020,
  title = {Federated Optimization in Heterogeneous Networks},
  author = {Li, Tian and Sahu, Anit Kumar and Zaheer, Manzil and Sanjabi, Maziar and Talwalkar, Ameet and
    Smith, Virginia},
  booktitle = {Machine Learning and Systems},
  year = {2020},
}""",
    "acar2021": """@inproceedings{acar2021,
  title = {Federated Learning Based on Dynamic Regularization},
  author = {Acar, Durmus Alp Emre and Zhao, Yue and Matas Navarro, Ramon and Mattina, Matthew and
    Whatmough, Paul N. and Saligrama, Venkatesh},
  booktitle = {International Conference on Learning Representations},
  year = {2021},
}""",
    "karimireddy2020": """@inproceedings{karimireddy2020,
  title = {{SCAFFOLD}: Stochastic Controlled Averaging for Federated Learning},
  author = {Karimireddy, Sai Praneeth and Kale, Satyen and Mohri, Mehryar and Reddi, Sashank J. and
    Stich, Sebastian U. and Suresh, Ananda Theertha},
  booktitle = {International Conference on Machine Learning},
  year = {2020},
}""",
    "wang2020": """@inproceedings{wang2020,
  title = {Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization},
  author = {Wang, Jianyu and Liu, Qinghua and Liang, Hao and Joshi, Gauri and Poor, H. Vincent},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2020},
}""",
    "reddi2021": """@inproceedings{reddi2021,
  title = {Adaptive Federated Optimization},
  author = {Reddi, Sashank J. and Charles, Zachary and Zaheer, Manzil and Garrett, Zachary and Rush, Keith and
    Kone{\\v{c}}n{\\'y}, Jakub and Kumar, Sanjiv and McMahan, H. Brendan},
  booktitle = {International Conference on Learning Representations},
  year = {2021},
}""",
    "hsu2019": """@article{hsu2019,
  title = {Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification},
  author = {Hsu, Tzu-Ming Harry and Qi, Hang and Brown, Matthew},
  journal = {arXiv preprint arXiv:1909.06335},
  year = {2019},
}""",
    "zhao2018": """@article{zhao2018,
  title = {Federated Learning with Non-{IID} Data},
  author = {Zhao, Yue and Li, Meng and Lai, Liangzhen and Suda, Naveen and Civin, Damon and Chandra, Vikas},
  journal = {arXiv preprint arXiv:1806.00582},
  year = {2018},
}""",
    "chen2021": """@inproceedings{chen2021,
  title = {{FedBE}: Making {Bayesian} Model Ensemble Applicable to Federated Learning},
  author = {Chen, Hong-You and Chao, Wei-Lun},
  booktitle = {International Conference on Learning Representations},
  year = {2021},
}""",
    "li2021": """@inproceedings{li2021,
  title = {Ditto: Fair and Robust Federated Learning Through Personalization},
  author = {Li, Tian and Hu, Shengyuan and Beirami, Ahmad and Smith, Virginia},
  booktitle = {International Conference on Machine Learning},
  year = {2021},
}""",
    "liang2020": """@article{liang2020,
  title = {Think Locally, Act Globally: Federated Learning with Local and Global Representations},
  author = {Liang, Paul Pu and Liu, Terrance and Ziyin, Liu and Allen, Nicholas B. and Auerbach, Randy P. and
    Brent, David and Salakhutdinov, Ruslan and Morency, Louis-Philippe},
  journal = {arXiv preprint arXiv:2001.01523},
  year = {2020},
}""",
    "lian2017": """@inproceedings{lian2017,
  title = {Can Decentralized Algorithms Outperform Centralized Algorithms? {A} Case Study for Decentralized Parallel
    Stochastic Gradient Descent},
  author = {Lian, Xiangru and Zhang, Ce and Zhang, Huan and Hsieh, Cho-Jui and Zhang, Wei and Liu, Ji},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2017},
}""",
    "localgd": """@misc{localgd,
  title = {Distributed Gradient Descent with Many Local Steps in Overparameterized Models},
  author = {Anonymous},
  note = {Under double-blind review},
}""",
    "liu_deep_linear": """@article{liu_deep_linear,
  title = {A Neural Tangent Kernel View on Federated Averaging for Deep Linear Neural Network},
  author = {Liu, Xin and Zhan, Dazhi and Tao, Wei and Ma, Xin and Pan, Yu and Ding, Yu and Pan, Zhisong},
  journal = {arXiv preprint},
}""",
    "alistarh2017": """@inproceedings{alistarh2017,
  title = {{QSGD}: Communication-Efficient {SGD} via Gradient Quantization and Encoding},
  author = {Alistarh, Dan and Grubic, Demjan and Li, Jerry and Tomioka, Ryota and Vojnovic, Milan},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2017},
}""",
    "haddadpour2021": """@inproceedings{haddadpour2021,
  title = {Federated Learning with Compression: Unified Analysis and Sharp Guarantees},
  author = {Haddadpour, Farzin and Kamani, Mohammad Mahdi and Mokhtari, Aryan and Mahdavi, Mehrdad},
  booktitle = {International Conference on Artificial Intelligence and Statistics},
  year = {2021},
}""",
    "reisizadeh2020": """@inproceedings{reisizadeh2020,
  title = {{FedPAQ}: A Communication-Efficient Federated Learning Method with Periodic Averaging and Quantization},
  author = {Reisizadeh, Amirhossein and Mokhtari, Aryan and Hassani, Hamed and Jadbabaie, Ali and Pedarsani, Ramtin},
  booktitle = {International Conference on Artificial Intelligence and Statistics},
  year = {2020},
}""",
    "mcmahan2018": """@inproceedings{mcmahan2018,
  title = {Learning Differentially Private Recurrent Language Models},
  author = {McMahan, H. Brendan and Ramage, Daniel and Talwar, Kunal and Zhang, Li},
  booktitle = {International Conference on Learning Representations},
  year = {2018},
}""",
    "he2016": """@inproceedings{he2016,
  title = {Deep Residual Learning for Image Recognition},
  author = {He, Kaiming and Zhang, Xiangyu and Ren, Shaoqing and Sun, Jian},
  booktitle = {IEEE Conference on Computer Vision and Pattern Recognition},
  year = {2016},
}""",
    "wu_he2018": """@inproceedings{wu_he2018,
  title = {Group Normalization},
  author = {Wu, Yuxin and He, Kaiming},
  booktitle = {European Conference on Computer Vision},
  year = {2018},
}""",
    "sandler2018": """@inproceedings{sandler2018,
  title = {{MobileNetV2}: Inverted Residuals and Linear Bottlenecks},
  author = {Sandler, Mark and Howard, Andrew and Zhu, Menglong and Zhmoginov, Andrey and Chen, Liang-Chieh},
  booktitle = {IEEE Conference on Computer Vision and Pattern Recognition},
  year = {2018},
}""",
    "ma2018": """@inproceedings{ma2018,
  title = {{ShuffleNet V2}: Practical Guidelines for Efficient {CNN} Architecture Design},
  author = {Ma, Ningning and Zhang, Xiangyu and Zheng, Hai-Tao and Sun, Jian},
  booktitle = {European Conference on Computer Vision},
  year = {2018},
}""",
}


def papers_of(algorithm: Algorithm | str) -> tuple[str, ...]:
    """Returns the papers of an algorithm: keys of ``PAPERS``, or BibTeX.

    For an algorithm around another one, such as ``fed_prox_ensemble``, the papers of the outer algorithm come first.

    Args:
        algorithm: An ``Algorithm``, or the name of one.

    Raises:
        ValueError: The algorithm has no entry.
    """
    name = algorithm if isinstance(algorithm, str) else algorithm.name
    entries = catalogue("algorithms")
    if name in entries:
        found: tuple[str, ...] = entries[name].papers
        return found
    for wrapper in (entry for entry in entries.values() if entry.has_base):
        inside, ending, rest = name.rpartition("_" + wrapper.name.removeprefix("fed_"))
        if inside and ending and not rest:
            return tuple(dict.fromkeys((*wrapper.papers, *papers_of(inside))))
    raise ValueError(f"cite: got the algorithm {name!r}, known are {', '.join(entries)}")


def cite(algorithm: Algorithm | str) -> str:
    """Returns the BibTeX of an algorithm's papers, as in ``cite("fed_avg")``.

    Args:
        algorithm: An ``Algorithm``, or the name of one.

    Raises:
        ValueError: The algorithm has no entry.
    """
    return "\n\n".join(PAPERS.get(paper, paper) for paper in papers_of(algorithm))
