"""Fixed features of images, for training a last linear layer alone."""

from fedtangent.data.features.blocks import Features, with_features
from fedtangent.data.features.convolution import random_convolution
from fedtangent.data.features.resnet50 import resnet50_features

__all__ = ["Features", "random_convolution", "resnet50_features", "with_features"]
