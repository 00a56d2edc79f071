"""ResNets, MobileNetV2 and ShuffleNetV2: published sizes, a plain forward pass, images of every size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedtangent._src import pytrees
from fedtangent._src.models import build, images

from ..drawn import parameters
from ..nightly import nightly

TINY = {
    "resnet18": {"width": 4, "blocks": (1, 1), "convolution": "gemm"},
    "mobilenet_v2": {"width": 0.1, "blocks": (1, 2)},
    "shufflenet_v2": {"width": 0.5, "blocks": (2,)},
}


def tiny(name, shape=(8, 8, 3), output_size=3):
    return build(name, shape, output_size, kind="image", **TINY[name])


# torchvision's ResNet_WEIGHTS.meta["num_params"], for ImageNet: a stem of 7x7 windows, 1000 classes
STEMS, OUTPUTS = (7 * 7 - 3 * 3) * 3 * 64, (512 + 1) * (1000 - 10)
PUBLISHED = {
    # ResNet18_Weights and ResNet34_Weights; less the differences the CIFAR networks' 11.17 and 21.28 million
    "resnet18": (11_689_512 - STEMS - OUTPUTS, 10, {"convolution": "gemm"}),
    "resnet34": (21_797_672 - STEMS - OUTPUTS, 10, {"convolution": "gemm"}),
    # MobileNet_V2_Weights; Sandler et al. (2018), table 4, have 3.4 million
    "mobilenet_v2": (3_504_872, 1000, {}),
    # ShuffleNet_V2_X1_0_Weights and its sisters; Ma et al. (2018), table 8, have 2.3, 1.4, 3.5 and 7.4 million
    "shufflenet_v2": (2_278_604, 1000, {}),
    "shufflenet_v2 0.5": (1_366_792, 1000, {"width": 0.5}),
    "shufflenet_v2 1.5": (3_503_624, 1000, {"width": 1.5}),
    "shufflenet_v2 2": (7_393_996, 1000, {"width": 2.0}),
}


@pytest.mark.parametrize("name", nightly(PUBLISHED, ["resnet18", "mobilenet_v2"]))
def test_published_numbers_of_parameters(name):
    """GroupNorm's scale and shift of each channel are as many as batch normalisation's."""
    expected, classes, options = PUBLISHED[name]
    model = build(name.split()[0], (32, 32, 3), classes, **options)
    assert pytrees.size(jax.eval_shape(model.init, jax.random.key(0))) == expected


def test_what_the_docstrings_say():
    for name, expected in {"resnet18": 11_173_962, "resnet34": 21_282_122}.items():
        assert PUBLISHED[name][0] == expected
    assert 3_504_872 - 1281 * 990 == 2_236_682 and 2_278_604 - 1025 * 990 == 1_263_854


# ---- a plain forward pass: the library's convolutions, NumPy's normalisation ----


def conv(x, kernel, stride=1, groups=1):
    pad = [(kernel.shape[0] // 2,) * 2] * 2
    numbers = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(x, kernel, (stride,) * 2, pad, dimension_numbers=numbers, feature_group_count=groups)
    return np.asarray(y)


def norm(x, part, groups=2):
    parts = x.reshape((len(x), -1, groups, x.shape[-1] // groups))
    mean, variance = parts.mean((1, 3), keepdims=True), parts.var((1, 3), keepdims=True)
    return ((parts - mean) / np.sqrt(variance + 1e-5)).reshape(x.shape) * part["scale"] + part["bias"]


def relu(x):
    return np.maximum(x, 0)


class Layers:
    """The layers of one module, called in their order."""

    def __init__(self, params):
        self.params, self.number = params, 0

    def __call__(self, x, stride=1, depthwise=False):
        kernel, part = (self.params[f"{kind}_{self.number}"] for kind in ("Conv", "GroupNorm"))
        self.number += 1
        return norm(conv(x, kernel["kernel"], stride, x.shape[-1] if depthwise else 1), part)


def output(x, params):
    return x.mean((1, 2)) @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]


def resnet(params, x):
    """8x8 images: two stages of a block, the second of which halves."""
    x = relu(Layers(params)(x))
    for b, stride in enumerate((1, 2)):
        layers = Layers(params[f"Block_{b}"])
        y = layers(relu(layers(x, stride)))
        x = relu(y + (layers(x, stride) if stride > 1 else x))
    return output(x, params)


def mobilenet(params, x):
    """8x8 images, which are halved by the stage that the tiny network leaves out: three blocks of stride 1."""
    outside = Layers(params)
    x = np.clip(outside(x), 0, 6)
    for b in range(3):
        layers = Layers(params[f"Block_{b}"])
        y = np.clip(layers(x), 0, 6) if b > 0 else x
        y = layers(np.clip(layers(y, depthwise=True), 0, 6))
        x = x + y if x.shape == y.shape else y
    return output(np.clip(outside(x), 0, 6), params)


def shufflenet(params, x):
    """8x8 images: a reducing unit of stride 1 and a plain one."""
    outside = Layers(params)
    x = relu(outside(x))

    def branch(layers, x):
        return relu(layers(layers(relu(layers(x)), depthwise=True)))

    def shuffle(left, right):
        x = np.concatenate([left, right], -1)
        return x.reshape((*x.shape[:-1], 2, -1)).swapaxes(-1, -2).reshape(x.shape)

    layers = Layers(params["Reducing_0"])
    left = relu(layers(layers(x, depthwise=True)))
    x = shuffle(left, branch(layers, x))
    left, right = np.split(x, 2, axis=-1)
    x = shuffle(left, branch(Layers(params["Unit_0"]), right))
    return output(relu(outside(x)), params)


PLAIN = {"resnet18": resnet, "mobilenet_v2": mobilenet, "shufflenet_v2": shufflenet}


@pytest.mark.parametrize("name", nightly(PLAIN, ["mobilenet_v2"]))
def test_outputs_are_those_of_a_plain_forward_pass(name):
    model = tiny(name)
    params = jax.tree.map(np.float64, parameters(model, scale=0.5))
    x = np.random.default_rng(1).normal(size=(3, 8, 8, 3))
    ours = np.asarray(jax.jit(model.apply)(params, x.reshape((3, -1))))
    expected = PLAIN[name](params, x)
    assert np.abs(ours - expected).max() < 1e-10 * np.abs(expected).max()
    # an example by itself: nothing is a batch's
    np.testing.assert_allclose(jax.jit(model.apply)(params, x[1:2])[0], ours[1], rtol=1e-9)
    # negative control: the weights of another layer of the same shape
    first = next(k for k in params if k.startswith("GroupNorm"))
    wrong = params | {first: jax.tree.map(lambda leaf: leaf[::-1], params[first])}
    assert np.abs(PLAIN[name](wrong, x) - expected).max() > 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("side", "expected"),
    [(4, [1, 1, 1, 1, 1]), (8, [1, 1, 1, 1, 2]), (28, [1, 1, 2, 2, 2]), (32, [1, 1, 2, 2, 2]), (224, [2, 2, 2, 2, 2])],
)
def test_how_often_an_image_is_halved(side, expected):
    assert images.strides((side, side + 1, 3), 5) == expected


def test_the_pooling_of_large_images():
    for side, pooled in ((64, True), (32, False)):
        model = tiny("shufflenet_v2", (side, side, 1))
        program = str(jax.make_jaxpr(model.apply)(parameters(model), jnp.zeros((2, side, side))))
        assert ("reduce_window" in program) == pooled


SHAPES = [(28, 28), (5, 9, 2)]  # and 8 x 8, 32 x 32 above


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("shape", [pytest.param(SHAPES[0], marks=pytest.mark.slow), SHAPES[1]], ids=str)
def test_every_network_takes_images_of_every_size(name, shape):
    """By day of one that is neither square nor of one channel."""
    model = tiny(name, shape, 7)
    assert jax.eval_shape(model.apply, parameters(model), jnp.zeros((2, np.prod(shape)))).shape == (2, 7)


BAD = {
    "too small": ("resnet18", (3, 8, 3), {}, r"input_shape: got \(3, 8, 3\), must be at least 4 high and wide"),
    "vectors": ("mobilenet_v2", (64,), {}, r"input_shape: got \(64,\), must be \(height, width, channels\)"),
    "groups": ("resnet18", (8, 8, 1), {"groups": 32, "width": 8}, "groups: got 32, must divide the channels of every"),
    "odd halves": ("shufflenet_v2", (8, 8, 1), {"groups": 16}, "groups: got 16, must divide .*24, 58, 116, 232, 1024"),
    "no groups": ("mobilenet_v2", (8, 8, 1), {"groups": 0}, "groups: got 0"),
    "blocks": ("resnet34", (8, 8, 1), {"blocks": ()}, "blocks: got .* must be of one to 4 stages"),
    "no blocks": ("shufflenet_v2", (8, 8, 1), {"blocks": (1, 0)}, "blocks: got 0"),
    "width": ("resnet18", (8, 8, 1), {"width": 0}, "width: got 0"),
    "a width that is not published": ("shufflenet_v2", (8, 8, 1), {"width": 0.75}, "width: got 0.75, allowed are 0.5"),
    "no width": ("mobilenet_v2", (8, 8, 1), {"width": float("nan")}, "width: got nan"),
    "convolution": ("resnet18", (8, 8, 1), {"convolution": "fft"}, "convolution: got 'fft', allowed are auto, lax"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    name, shape, options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        build(name, shape, 10, **options)


def test_examples_of_another_size():
    model = tiny("resnet18")
    with pytest.raises(ValueError, match=r"x: got \(2, 5\), must be examples of \(8, 8, 3\)"):
        model.apply(parameters(model), jnp.zeros((2, 5)))
