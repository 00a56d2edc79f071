"""Fixed features of images, for training only a last linear layer on them."""

from fedtangent._src.data.features.convolution import Features, random_convolution, with_features
from fedtangent._src.data.features.resnet50 import resnet50_features

__all__ = ["Features", "random_convolution", "resnet50_features", "with_features"]
