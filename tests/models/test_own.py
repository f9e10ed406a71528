"""Networks from outside: a user's own module, torchvision's, timm's and transformers'."""

from __future__ import annotations

import itertools
import os
import random
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import rayfl
from rayfl.data import Samples
from rayfl.errors import ConfigError
from rayfl.losses import LOSSES
from rayfl.models import MODELS, ModelSpec
from rayfl.models.modules.own import derived_layers, replace_batch_norm
from rayfl.models.modules.stems import for_small_images
from rayfl.models.remarks import remarks
from rayfl.training import LocalWork
from rayfl.training.batches import Batches
from rayfl.training.engine import choose_engine
from rayfl.training.loop import LoopEngine

HERE = "tests.models.test_own"
IMAGE = (3, 8, 8)


class Net(nn.Module):
    """What a user might write."""

    def __init__(self, shape: tuple[int, ...], num_classes: int, width: int = 4) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(shape[0], width, 3, padding=1), nn.BatchNorm2d(width)
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.scale = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.stem(x)))
        return self.head((x + self.body(x)).mean((2, 3)) * self.scale)


class Looks(Net):
    """A constructor that reads numbers, which are not there on the meta device."""

    def __init__(self, shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__(shape, num_classes)
        self.depth = int(torch.linspace(0, 3, 4)[-1].item())


class Flat(nn.Module):
    """To be spoilt."""

    def __init__(self, shape: tuple[int, ...], classes: int, fault: str = "") -> None:
        super().__init__()
        self.fc = nn.Linear(int(np.prod(shape)), classes)
        self.fault = fault
        if fault == "raises":
            raise ValueError("not today\nnor tomorrow")
        if fault == "double":
            self.double()
        if fault == "frozen":
            self.fc.bias.requires_grad_(False)
        if fault == "infinite":
            self.register_buffer("mask", torch.tensor([-torch.inf]))
        if fault == "draws":
            nn.init.constant_(self.fc.bias, np.random.default_rng().random())
        if fault == "empty":
            del self.fc
        if fault == "lazy":
            self.fc = nn.LazyLinear(classes)
        if fault == "exits":
            sys.exit("no GPU here")
        self.calls, self.generator = 0, np.random.default_rng(0)
        self.table = torch.ones(classes)
        if fault == "another":
            self.table = torch.from_numpy(np.random.default_rng().random(classes, dtype=np.float32))
        if fault == "seeded":
            self.table = torch.from_numpy(np.random.random(classes).astype(np.float32))  # noqa: NPY002
        if fault == "not kept":
            self.register_buffer("late", None, persistent=False)
            self.register_buffer("offset", torch.rand(classes), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        if self.fault == "leaves":
            sys.exit(3)
        if self.fault == "counts":
            self.calls += self.training
        if self.fault == "draws in training" and self.training:
            x = x * float(self.generator.random())
        if self.fault == "remembers" and self.training:  # a tensor, of which nothing else is seen
            self.table = 0.9 * self.table + self.fc.weight.detach().sum()
        if self.fault == "not kept" and self.late is None:
            self.late = torch.ones(1)
        if self.fault == "re-enters":
            return checkpoint(self.fc, x.flatten(1).requires_grad_(), use_reentrant=True)
        y = self.fc(x if self.fault == "shape" else x.view(2, -1) if self.fault == "two" else x.flatten(1))
        if self.fault == "spoilt":  # exp's gradient needs what is overwritten
            y = y.exp()
            y += 1
        faults = {"tuple": (y, y), "wide": y.repeat(1, 2), "half": y.half(), "one": y[0]}
        faults |= {"detached": y.detach(), "squeeze": y.squeeze()}
        if self.fault in ("another", "seeded", "remembers"):
            y = y * self.table
        if self.fault == "not kept":
            y = y * self.late + self.offset
        return faults.get(self.fault, y)


class Two(Flat):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        return super().forward(x)


def numbers(classes: int) -> list[int]:
    return [classes]


BUILT, NUMBER = Flat((2,), 2), 3


def own(target: str, **settings: Any) -> Any:
    return MODELS["module"](target=f"{HERE}:{target}", **settings)


def spec_of(model: Any, shape: tuple[int, ...] = IMAGE, classes: int = 5) -> ModelSpec:
    """As a run does before it starts."""
    model.prepare()
    spec = ModelSpec.of(model, shape, classes, 0)
    model.check(spec.build, spec.shape, spec.classes)
    return spec


def test_shape_and_classes_are_handed_in_unless_given() -> None:
    spec = spec_of(own("Net", kwargs={"width": 6}))
    assert spec.build()(torch.zeros(2, *IMAGE)).shape == (2, 5)
    assert spec.shapes[spec.names.index("stem.weight")] == (6, 3, 3, 3)
    with pytest.raises(ConfigError, match=r"forward returns shape \(2, 4\) for 2 samples"):
        spec_of(own("Net", kwargs={"num_classes": 4}))


def test_layers_are_the_children_in_order() -> None:
    """A normalisation belongs to what is before it, a container is taken apart, the root's own are layers."""
    spec = spec_of(own("Net"))
    assert list(spec.layers) == ["scale", "stem", "body.0", "head"]
    assert spec.segment(["stem"]) == spec.segment(["stem"])
    held = {name for name, place in zip(spec.names, spec.slices, strict=True)
            if any(a <= place.start < b for a, b in spec.layers["body.0"])}  # fmt: skip
    assert held == {f"body.0.{n}" for n in ("weight", "bias")} | {
        f"body.1.{n}" for n in ("weight", "bias", "running_mean", "running_var")
    }


class Ending(Flat):
    """Ends in one of PyTorch's functions."""

    def forward(self, x: torch.Tensor) -> Any:
        return getattr(torch, self.fault)(self.fc(x.flatten(1)), 1)


def test_probabilities_in_place_of_logits_are_noticed() -> None:
    spec = spec_of(own("Ending", kwargs={"fault": "softmax"}))
    (line,) = remarks(spec)
    assert "the network returns probabilities, but cross_entropy" in line
    assert remarks(replace(spec, loss=LOSSES["bce"]())) == []
    assert remarks(spec_of(own("Ending", kwargs={"fault": "log_softmax"}))) == []
    assert remarks(spec_of(own("Net"))) == []


class Picky(Flat):
    """Refuses what it is not promised."""

    def forward(self, x: torch.Tensor) -> Any:
        if self.fault == "tokens":
            return functional.one_hot(x, 5).float().mean(1)
        if self.fault == "always":
            raise ValueError("not today")
        assert 0 <= x.min() <= x.max() <= 1
        return torch.softmax(self.fc(x.flatten(1)), 1)


def test_a_network_is_not_refused_by_a_remark() -> None:
    assert len(remarks(spec_of(own("Picky")))) == 1
    texts = own("Picky", kwargs={"fault": "tokens"}, task="texts")
    assert len(remarks(ModelSpec.of(texts, (7,), 5, 0))) == 1
    assert remarks(ModelSpec.of(own("Picky", kwargs={"fault": "always"}), IMAGE, 5, 0)) == []


def test_a_loss_of_ones_own_may_take_probabilities() -> None:
    loss = type("Nll", (type(LOSSES["cross_entropy"]()),), {"__module__": "elsewhere"})()
    assert remarks(replace(spec_of(own("Picky")), loss=loss)) == []


@pytest.mark.parametrize("fault", ["seeded", "not kept"])
def test_what_a_network_may_draw_and_keep(fault: str) -> None:
    """From generators that are seeded; and what it fills in on first sight of a batch."""
    spec = spec_of(own("Flat", kwargs={"fault": fault}))
    np.random.seed(5)  # noqa: NPY002
    before = np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    first, second = spec.build(), spec.build()
    assert torch.equal(first.table, second.table)
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]  # noqa: NPY002
    x = torch.rand(2, *IMAGE)
    assert torch.equal(first(x), second(x))


def test_layers_may_be_given() -> None:
    first = ["stem", "norm", "scale"]
    assert list(spec_of(own("Net", layers={"one": first, "two": ["body", "head"]})).layers) == ["one", "two"]
    with pytest.raises(ConfigError, match=r"model.layers.one: the network has no 'hed'; did you mean 'head'"):
        spec_of(own("Net", layers={"one": ["hed"]}))
    with pytest.raises(ConfigError, match=r"model.layers: module has tensors in no layer: body\.0\.weight"):
        spec_of(own("Net", layers={"one": [*first, "head"]}))
    with pytest.raises(ConfigError, match=r"stem.weight belongs to two layers"):
        spec_of(own("Net", layers={"one": first, "two": ["stem", "body", "head"]}))


def test_shared_tensors_wrappers_and_large_children() -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight, b.bias = a.weight, a.bias
    assert derived_layers(nn.Sequential(a, nn.ReLU(), b)) == {"0": ("0",)}
    wrapped = nn.ModuleDict({"network": nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))})
    assert derived_layers(wrapped) == {
        "network.0": ("network.0", "network.1"),
        "network.2": ("network.2",),
    }


def test_a_constructor_that_reads_numbers() -> None:
    assert spec_of(own("Looks")).P == spec_of(own("Net")).P


def test_batch_norm_becomes_group_norm() -> None:
    spec = spec_of(own("Net", norm="group"))
    module = spec.build()
    assert isinstance(module.norm, nn.GroupNorm)
    assert isinstance(module.body[1], nn.GroupNorm)
    assert module.norm.num_groups == 4
    assert spec.n_parameters == spec.P
    with pytest.raises(ConfigError, match=r"model.norm: the network has no BatchNorm"):
        spec_of(own("Flat", norm="group"))


def test_over_vectors_all_channels_are_one_group() -> None:
    """Groups of a single number each would be all zero, of two all one and minus one."""
    module = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU())
    replace_batch_norm(module)
    x = torch.randn(1, 5)  # a batch of one sample
    expected = functional.layer_norm(module[0](x), (16,))
    torch.testing.assert_close(module(x), expected.relu())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"target": "no_such_module:Net"}, "model.target: no module named 'no_such_module'"),
        ({"target": f"{HERE}:Nett"}, "has no 'Nett'; did you mean 'Net'"),
        ({"target": "Net"}, "'Net' is not a target"),
        ({"target": f"{HERE}:NUMBER"}, "NUMBER is a int"),
        ({"target": f"{HERE}:Path"}, "is the class"),
        ({"target": f"{HERE}:BUILT"}, "is a network that has been built; expected its class"),
        ({"target": f"{HERE}:numbers"}, "numbers returns a list; expected a torch.nn.Module"),
        ({"kwargs": {"depth": 3}}, "model.kwargs: .*unexpected keyword argument 'depth'"),
        ({"fault": "raises"}, "model.target: .*Flat cannot be built: ValueError: not today$"),
        ({"fault": "double"}, "fc.weight is torch.float64; only float32"),
        ({"fault": "frozen"}, "fc.bias has requires_grad=False; every parameter is trained"),
        ({"fault": "infinite"}, r"mask starts with NaN or infinity; .*persistent=False"),
        ({"fault": "draws"}, "fc.bias starts with different numbers each time"),
        ({"fault": "another"}, "another one each time it is built, though its tensors are the same"),
        ({"fault": "counts"}, r"forward changes calls; what lasts from step to step belongs in a buffer"),
        ({"fault": "draws in training"}, "forward changes generator; what lasts"),
        ({"fault": "remembers"}, "forward returns other outputs when it is called again with the same"),
        ({"fault": "re-enters"}, r"the gradient of fc.weight only comes from backward.*use_reentrant=True"),
        ({"fault": "empty"}, "the network has no parameters"),
        ({"fault": "shape"}, r"forward fails for a batch of shape \(2, 3, 8, 8\): RuntimeError: mat1"),
        ({"fault": "tuple"}, "forward returns a tuple; expected a tensor"),
        ({"fault": "wide"}, r"forward returns shape \(2, 10\) for 2 samples; expected .*\(2, 5\)"),
        ({"fault": "one"}, r"forward returns shape \(5,\) for 2 samples"),
        ({"fault": "half"}, "forward returns torch.float16"),
        ({"fault": "lazy"}, r"fc.weight has no shape before the first batch \(a lazy module\); say how many"),
        ({"fault": "exits"}, "Flat cannot be built: SystemExit: no GPU here"),
        ({"fault": "leaves"}, "forward fails for a batch of .*: SystemExit: 3"),
        ({"fault": "detached"}, "no gradient flows from the logits to the parameters; does forward detach"),
        ({"fault": "spoilt"}, "the backward pass fails for a batch of .* modified by an inplace operation"),
        ({"fault": "two"}, r"forward fails for a batch of shape \(3, 3, 8, 8\): RuntimeError: mat1"),
        ({"fault": "squeeze"}, r"forward returns shape \(5,\) for 1 sample; expected .*\(1, 5\)"),
        ({"target": f"{HERE}:Two"}, r"forward takes 2 inputs \(x, mask\); expected one"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_in_a_line(model: dict[str, Any], message: str) -> None:
    fault = model.pop("fault", None)
    settings = {"target": f"{HERE}:Flat", **({"kwargs": {"fault": fault}} if fault else {}), **model}
    with pytest.raises(ConfigError, match=message) as raised:
        spec_of(MODELS["module"](**settings))
    assert "\n" not in str(raised.value)


RUN = {
    "rounds": 1,
    "data": {"name": "digits"},
    "partition": {"name": "iid", "clients": 3, "validation": 0.0},
    "training": {"epochs": 1, "batch_size": 60, "lr": 0.05},
    "execution": {"backend": "inline"},
}


def run(tmp_path: Path, **sections: Any) -> Any:
    return rayfl.run(
        {**RUN, "output": {"root": str(tmp_path), "report": False, "tensorboard": False}, **sections}
    )


class Masked(Flat):
    """Keeps a mask of its first batch, as many implementations of attention do."""

    def forward(self, x: torch.Tensor) -> Any:
        if not hasattr(self, "mask"):
            self.mask = torch.ones(1) * x.new_ones(1)
        return self.fc(x.flatten(1)) * self.mask


@pytest.mark.parametrize("section", [{"order": "curriculum"}, {"algorithm": {"name": "ifca", "clusters": 2}}])
def test_a_network_may_be_tested_before_it_is_trained(tmp_path: Path, section: dict[str, Any]) -> None:
    training = {**RUN["training"], "engine": "loop"}
    found = run(tmp_path, **section, model={"name": "module", "target": f"{HERE}:Masked"}, training=training)
    assert found.summary["rounds"] == 1


class Centred(Flat):
    """Subtracts the mean of the first batch that it sees, in a buffer that is not part of the model."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(shape, classes)
        self.register_buffer("centre", None, persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        if self.centre is None:
            self.centre = x.detach().mean(0)
        return self.fc((x - self.centre).flatten(1))


def test_outputs_that_depend_on_the_first_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match="outputs depend on the first batch that the network has seen"):
        spec_of(own("Centred"))


def test_a_run_is_read_though_its_network_would_be_refused_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(tmp_path, model={"name": "module", "target": f"{HERE}:Flat"})

    def refuse(*given: Any) -> None:
        raise ConfigError("model", "is refused now")

    monkeypatch.setattr("rayfl.models.modules.own.check_network", refuse)
    assert isinstance(result.model(cluster=0), Flat)
    assert result.client_model(0)
    with pytest.raises(ConfigError, match="is refused now"):
        rayfl.resume(result, "rounds=2")


def test_what_the_first_batch_fills_in_is_each_clients_own() -> None:
    spec = ModelSpec.of(own("Centred"), IMAGE, 5, 0)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((20, *IMAGE)).astype(np.float32), rng.integers(0, 5, 20)
    engine = LoopEngine(spec, Batches(Samples("random", x, y, x, y, 5), torch.device("cpu")), 0)
    start, indices = torch.from_numpy(spec.initial()).expand(2, -1), [np.arange(10), np.arange(10, 20)]
    work = LocalWork(1, 5, 0.1)
    together = engine.train(work, 0, [0, 1], indices, start).rows
    assert torch.equal(together[1:], engine.train(work, 0, [1], indices[1:], start[1:]).rows)


class Normed(nn.Sequential):
    """BatchNorm1d cannot be trained on one sample."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, classes))


@pytest.mark.parametrize(
    ("sizes", "batch_size", "remedy"),
    [
        (
            (40, 23, 30),
            20,
            "client 1 has 21 samples, .*ValueError: Expected more than 1.*; 21 leaves no such",
        ),
        ((40, 23, 48), 20, "client 1 has 21 samples, .*; 22 leaves no such batch"),
        ((40, 34, 30), 1, "client 0 has 36 samples, .*; 4 leaves no such batch"),
        ((40, 1, 30), 20, r"client 1 has 1 sample, .*; GroupNorm works with one sample \(model.norm=group\)"),
    ],
)
def test_a_batch_of_one_is_refused_where_the_network_needs_two(
    tmp_path: Path, sizes: tuple[int, ...], batch_size: int, remedy: str
) -> None:
    ends = np.cumsum([0, *sizes])  # a tenth of each client's samples are for validation
    clients = [list(range(a, b)) for a, b in itertools.pairwise(ends)]
    sections: dict[str, Any] = {
        "model": {"name": "module", "target": f"{HERE}:Normed"},
        "partition": clients,
        "training": {"epochs": 1, "batch_size": batch_size, "lr": 0.05},
    }
    with pytest.raises(ConfigError, match=f"training.batch_size: {remedy}") as raised:
        run(tmp_path, **sections)
    assert "\n" not in str(raised.value)
    if batch_size > 1:
        run(tmp_path, **sections, execution={"backend": "inline", "tolerate_failures": 2})
        run(tmp_path, **{**sections, "model": {**sections["model"], "norm": "group"}})


def test_an_own_network_runs(tmp_path: Path) -> None:
    """On an engine that equals the loop; layers of the hierarchy are its children."""
    sections = {
        "model": {"name": "module", "target": f"{HERE}:Net"},
        "algorithm": "mt_hfl",
        "clustering": {"n_clusters": 2},
        "hierarchy": {"common_layers": 2, "global_every": 1},
    }
    result = run(tmp_path, **sections)
    assert result.config.model.target == f"{HERE}:Net"
    with pytest.raises(ConfigError, match=r"module has 4 layers, not 5; use at most 4: scale, stem"):
        run(tmp_path, **{**sections, "hierarchy": {"common_layers": 5, "global_every": 1}})


def test_a_network_class_stands_for_its_settings(tmp_path: Path) -> None:
    assert run(tmp_path, model=Net).config.model == own("Net")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_trained_weights_come_from_a_file(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another number of classes: the last layer stays random. A relative path is from here."""
    trained = Net(IMAGE, 9)
    trained.norm.running_mean.fill_(0.5)
    monkeypatch.chdir(tmp_path)
    save(trained.state_dict(), Path("net" + suffix))
    spec = spec_of(own("Net", weights="net" + suffix))
    assert spec.model.weights == tmp_path / ("net" + suffix)
    module = spec.build()
    spec.load(module, spec.initial())
    assert torch.equal(module.stem.weight, trained.stem.weight)
    assert torch.equal(module.norm.running_mean, trained.norm.running_mean)
    assert torch.equal(module.head.weight, spec.build().head.weight)
    assert not np.array_equal(spec.initial(index=1), spec.initial())
    with pytest.raises(ConfigError, match=r"scale has shape \(4,\); the network's has shape"):
        spec_of(own("Net", weights="net" + suffix, kwargs={"width": 3}))
    Path("net" + suffix).write_text("nothing")
    with pytest.raises(ConfigError, match=r"model.weights: .* is not a state dict"):
        spec_of(own("Net", weights="net" + suffix))
    os.remove("net" + suffix)
    with pytest.raises(ConfigError, match=r"model.weights: .*: no such file"):
        spec_of(own("Net", weights="net" + suffix))


def save(state: dict[str, torch.Tensor], path: Path) -> None:
    if path.suffix == ".pth":
        torch.save(state, path)
    else:
        from safetensors.torch import save_file

        save_file(state, path)


ARCHS = ("resnet18", "vgg11_bn", "mobilenet_v3_small", "efficientnet_b0", "convnext_tiny", "vit_b_16")


def test_a_network_without_a_stem_for_small_images_is_named() -> None:
    with pytest.raises(ConfigError, match=r"model.stem: no cifar stem of maxvit_t; use stem=imagenet"):
        for_small_images("maxvit_t", nn.Identity(), (3, 32, 32), 5)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("channels", [1, 3])
def test_torchvisions_networks_take_small_images(arch: str, channels: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec = spec_of(MODELS["torchvision"](arch=arch, stem="cifar"), (channels, 32, 32))
    assert len(spec.layers) > 4
    first = next(s for n, s in zip(spec.names, spec.shapes, strict=True) if len(s) == 4)
    assert first[1] == channels


@pytest.mark.slow
def test_torchvision() -> None:
    spec = spec_of(MODELS["torchvision"](arch="resnet18", norm="group", stem="cifar"), (1, 16, 16))
    module = spec.build()
    assert module.conv1.stride == (1, 1)
    assert isinstance(module.maxpool, nn.Identity)
    assert isinstance(module.layer1[0].bn1, nn.GroupNorm)
    assert list(spec.layers)[:3] == ["conv1", "layer1.0", "layer1.1"]
    assert spec.n_parameters == spec.P


@pytest.mark.parametrize(
    ("settings", "shape", "message"),
    [
        ({"arch": "resnt18"}, (3, 32, 32), "torchvision has no network 'resnt18'; did you mean 'resnet18'"),
        ({}, (64,), r"resnet18 takes images, not samples of shape \(64,\)"),
        ({"arch": "squeezenet1_0", "stem": "cifar"}, (3, 32, 32), "no cifar stem of squeezenet1_0"),
        ({"arch": "vit_b_16"}, (1, 28, 28), "vit_b_16 cannot be built: AssertionError: Input"),
        ({"arch": "resnet18", "kwargs": {"depth": 3}}, (3, 32, 32), "resnet18 cannot be built: TypeError"),
    ],
)  # fmt: skip
def test_what_torchvision_cannot_build(
    settings: dict[str, Any], shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(MODELS["torchvision"](**settings), shape)


@pytest.mark.parametrize("name", ["timm", "transformers"])
def test_a_library_that_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ConfigError, match=rf"model.name: {name} cannot be imported .*pip install 'rayfl\[hub\]'"
    ):
        MODELS[name](arch="x").prepare()


def test_timm(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    spec = spec_of(MODELS["timm"](arch="resnet18"), (1, 32, 32))
    assert list(spec.layers)[:3] == ["conv1", "layer1.0", "layer1.1"]
    state = dict(spec.to_state_dict(np.full(spec.P, 0.25, np.float32)))
    torch.save(state, tmp_path / "w.pth")
    loaded = spec_of(MODELS["timm"](arch="resnet18", weights=tmp_path / "w.pth"), (1, 32, 32))
    assert (loaded.initial() == 0.25).all()
    with pytest.raises(ConfigError, match="timm has no network 'resnet1'"):
        spec_of(MODELS["timm"](arch="resnet1"))
    with pytest.raises(ConfigError, match="is a BatchNormAct2d, which is more than BatchNorm"):
        spec_of(MODELS["timm"](arch="efficientnet_lite0", norm="group"))


TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "patch_size": 4,
}


def test_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    spec = spec_of(MODELS["transformers"](arch="vit", kwargs=TINY), (1, 8, 8))
    assert list(spec.layers)[-1] == "network.classifier"
    assert len(spec.layers) > 3
    assert choose_engine(spec)[0] in ("vmap", "loop")
    inner = spec.build().network
    inner.config.save_pretrained(tmp_path)
    save(inner.state_dict(), tmp_path / "model.safetensors")
    again = spec_of(
        MODELS["transformers"](arch=str(tmp_path), weights=tmp_path / "model.safetensors"), (1, 8, 8)
    )
    np.testing.assert_array_equal(again.initial(), spec.flatten(spec.build()))
    assert transformers.__version__
    with pytest.raises(ConfigError, match="nope cannot be built"):
        spec_of(MODELS["transformers"](arch="nope"))


def test_a_function_that_returns_one_network_for_all_is_refused(tmp_path, monkeypatch):
    (tmp_path / "one_for_all.py").write_text(
        "import functools\nfrom torch import nn\nNET = nn.Linear(4, 2)\ndef same():\n    return NET\n"
        "@functools.cache\ndef cached():\n    return nn.Linear(4, 2)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("same", "cached"):
        with pytest.raises(ConfigError, match="returns the same network object in every call"):
            ModelSpec.of(MODELS["module"](target=f"one_for_all:{name}"), (4,), 2, 0)


def test_draws_of_python_and_numpy_are_the_clients_own(tmp_path, monkeypatch):
    (tmp_path / "drawing.py").write_text(
        "import random\nimport numpy as np\nfrom torch import nn\nclass Net(nn.Linear):\n"
        "    def __init__(self): super().__init__(4, 2)\n"
        "    def forward(self, x): return super().forward(x * random.random() * np.random.rand())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = ModelSpec.of(MODELS["module"](target="drawing:Net"), (4,), 2, 0)
    assert choose_engine(spec) == ("loop", mock.ANY)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((6, 4)).astype(np.float32), np.arange(6) % 2
    batches = Batches(Samples("s", x, y, x, y, 2), torch.device("cpu"))
    start = torch.from_numpy(np.tile(spec.initial(), (2, 1)))
    work = LocalWork(epochs=2, batch_size=3, lr=0.1)
    both = LoopEngine(spec, batches, 0).train(work, 0, [5, 7], [np.arange(6)] * 2, start).rows
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    alone = LoopEngine(spec, batches, 0).train(work, 0, [7], [np.arange(6)], start[:1]).rows
    assert torch.equal(both[1], alone[0])
    assert not torch.equal(both[0], both[1])
