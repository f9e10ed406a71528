"""Parts from a user's own folder."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from rayfl import cli, plugins
from rayfl.algorithms import ALGORITHMS
from rayfl.algorithms.fedavg import FedAvg
from rayfl.api import Result, client_models, resume, run
from rayfl.cli import _plugins_first
from rayfl.config import Config, describe_preset, load, presets, with_paper
from rayfl.config.kinds import KINDS, bring
from rayfl.errors import ConfigError
from rayfl.rundir import RunDirectory
from rayfl.study.plan import key_of

METHOD = """
from typing import Literal
from rayfl.algorithms.fedavg import FedAvg

class Own(FedAvg):
    '''FedAvg, my way.'''
    name: Literal["{name}"] = "{name}"
    strength: float = 0.5
"""

SMALL = {
    "rounds": 2,
    "partition": {"clients": 4},
    "execution": {"backend": "inline"},
    "output": {"root": "runs", "report": False, "tensorboard": False},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """An own folder, in which the test works, with files; this process knows no plug-in before, nor after."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setattr(plugins, "_restored", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    for registry in KINDS.values():
        monkeypatch.setattr(registry, "_added", {})

    def write(**files: str) -> Path:
        for name, text in files.items():
            path = tmp_path / (name.replace("_in_", "/") + ".py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()
        return tmp_path

    yield write
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def forget() -> None:
    """As in a new process."""
    for plugin in plugins.loaded():
        for name in plugin.files:
            sys.modules.pop(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."), None)
            sys.path[:] = [path for path in sys.path if path != str(plugin.folder)]
    plugins._loaded.clear()
    plugins._restored.clear()
    for registry in KINDS.values():
        registry._added.clear()
    importlib.invalidate_caches()


@pytest.mark.parametrize("given", ["own_a.py", "own_a", "./own_a.py"])
def test_a_method_in_an_own_file_is_a_choice(folder, given):
    folder(own_a=METHOD.format(name="half"))
    config = load({**SMALL, "plugins": [given], "algorithm": {"name": "half", "strength": 0.25}})
    assert config.algorithm.model_dump() == {"name": "half", "strength": 0.25}
    assert "half" in ALGORITHMS
    assert sys.path[-1] == str(Path.cwd())  # what lies beside a plug-in hides nothing that is installed
    assert load(config) == config


def test_methods_of_a_package_and_the_environment(folder, monkeypatch):
    folder(
        own_pack_in___init__="from own_pack.inner import Own",
        own_pack_in_inner=METHOD.format(name="packed"),
        own_env=METHOD.format(name="surrounding"),
    )
    monkeypatch.setenv("RAYFL_PLUGINS", "own_env.py, own_pack")
    assert load({**SMALL, "algorithm": "packed"}).algorithm.name == "packed"
    assert {"packed", "surrounding"} <= set(ALGORITHMS)


def test_a_package_brings_presets(folder, monkeypatch):
    root = folder(own_shelf_in___init__=METHOD.format(name="shelved"))
    (root / "own_shelf" / "presets").mkdir()
    preset = {**SMALL, "algorithm": {"name": "shelved", "strength": 0.25}, "plugins": ["own_shelf"]}
    text = f"# A method from a shelf.\n{json.dumps(preset)}"
    for name in ("shelved-digits", "digits-demo"):
        (root / "own_shelf" / "presets" / f"{name}.yaml").write_text(text)
    with pytest.raises(ConfigError, match="no such preset"):
        load("shelved-digits")
    monkeypatch.setenv("RAYFL_PLUGINS", "own_shelf")
    assert load("shelved-digits").algorithm.model_dump() == {"name": "shelved", "strength": 0.25}
    assert load("digits-demo").algorithm.name != "shelved"  # rayfl's own are not hidden
    assert describe_preset(presets()["shelved-digits"]) == "A method from a shelf."
    assert with_paper(presets()["shelved-digits"])[0] is None


def test_a_module_of_a_package_brings_the_package_s_presets(folder):
    """As entry points name the modules with parts, not the package."""
    root = folder(own_rack_in___init__="", own_rack_in_method=METHOD.format(name="racked"))
    (root / "own_rack" / "presets").mkdir()
    (root / "own_rack" / "presets" / "racked-digits.yaml").write_text(
        json.dumps({**SMALL, "algorithm": "racked"})
    )
    bring(["own_rack.method"])
    assert load("racked-digits").algorithm.name == "racked"


def test_an_installed_package_brings_its_parts_by_its_entry_point(folder, monkeypatch):
    root = folder(
        own_site_in_own_installed=METHOD.format(name="installed"),
    )
    info = root / "own_site" / "own_installed-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-installed\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rayfl.parts]\nmine = own_installed\n")
    monkeypatch.syspath_prepend(str(root / "own_site"))
    plugins._entry_points.cache_clear()
    try:
        assert load({**SMALL, "algorithm": "installed"}).algorithm.name == "installed"
    finally:
        plugins._entry_points.cache_clear()


def test_a_part_that_cannot_be_chosen_is_named(folder):
    """A file may have a base class alone, of which another file's parts are; but who looks for it is told."""
    base = "from rayfl.algorithms.base import Algorithm\nclass Calm(Algorithm):\n    rate: float = 1.0\n"
    folder(own_h=base, own_i=METHOD.format(name="fine"))
    assert load({**SMALL, "plugins": ["own_h.py", "own_i.py"], "algorithm": "fine"})
    with pytest.raises(
        ConfigError, match=r"no algorithm named 'calm'; .*Calm has no name: add name: Literal"
    ):
        load({**SMALL, "plugins": ["own_h.py"], "algorithm": "calm"})


def test_what_a_plug_in_imports_from_its_own_folder_belongs_to_it(folder):
    folder(
        own_b="import json, numpy\nfrom own_helper import x\ndef f():\n    from own_parts import deep\nf()",
        own_helper="import own_third\nx = 1",
        own_third="",
        own_other="",
        own_parts_in___init__="",
        own_parts_in_deep="from . import sibling",
        own_parts_in_sibling="",
    )
    bring(["own_b.py"])
    [plugin] = plugins.loaded()
    assert plugin.files == (
        "own_b.py",
        "own_helper.py",
        "own_parts/__init__.py",
        "own_parts/deep.py",
        "own_parts/sibling.py",
        "own_third.py",
    )
    assert plugin.now() == plugin
    Path("own_third.py").write_text("y = 2")
    changed = plugin.now()
    assert changed is not None
    assert changed.sha256 != plugin.sha256
    Path("own_third.py").unlink()
    assert plugin.now() is None


def test_imports_by_a_name_in_quotes_belong_to_a_plug_in(folder):
    folder(
        own_r="import importlib\nimportlib.import_module('own_s')\n__import__('own_t')\nname = 'own_u'\n"
        "importlib.import_module(name)\nimportlib.import_module('own_q.deep')",
        own_s="",
        own_t="",
        own_u="",
        own_q_in___init__="",
        own_q_in_deep="from importlib import import_module\nimport_module('.side', __package__)",
        own_q_in_side="",
    )
    bring(["own_r.py"])
    [plugin] = plugins.loaded()
    assert plugin.files == (
        "own_q/__init__.py",
        "own_q/deep.py",
        "own_q/side.py",
        "own_r.py",
        "own_s.py",
        "own_t.py",
    )


def test_only_modules_of_the_folder_are_packed(folder, tmp_path):
    folder(own_c="import own_d", own_d="", own_p_in___init__="")
    bring(["own_c.py", "own_p", "statistics"])
    packed = tmp_path / "packed"
    packed.mkdir()
    assert [path.name for path in plugins.pack(packed)] == ["own_c.py", "own_d.py", "own_p"]
    assert [plugin.installed for plugin in plugins.loaded()] == [False, False, True]
    assert plugins.variables() == {"RAYFL_TRAVELLED_PLUGINS": "own_c,own_p"}


BAD = {
    "no file": ("missing.py", {}, "plugins: missing.py: no such file"),
    "no module": ("no_such_module", {}, "plugins: no module named 'no_such_module' in the current"),
    "syntax": ("own_s.py", {"own_s": "a = 1\ndef f(:\n"}, r"own_s.py:2: not Python: "),
    "raises": ("own_r.py", {"own_r": "x = 1\nx / 0\n"}, r"own_r.py:2: ZeroDivisionError: division by zero"),
    "raises below": (
        "own_q.py",
        {"own_q": "import own_z", "own_z": "\n\nraise ValueError('two\\nlines')"},
        r"own_z.py:3: ValueError: two lines$",
    ),
    "raises in a library": (
        "own_j.py",
        {"own_j": "import json\njson.loads('{')\n"},
        r"own_j.py:2: JSONDecode",
    ),
    "leaves": ("own_l.py", {"own_l": "import sys\nsys.exit(3)"}, r"own_l.py:2: SystemExit: 3"),
    "imports what is missing": (
        "own_m.py",
        {"own_m": "import no_such_thing"},
        r"own_m.py:1: ModuleNotFoundError: No module named 'no_such_thing'",
    ),
    "a setting of a type that cannot be one": (
        "own_f.py",
        {"own_f": METHOD.format(name="own-f") + "    generator: __import__('random').Random | None = None\n"},
        r"own_f.py:5: Unable to generate pydantic-core schema for .*; settings are numbers, text, true or",
    ),
    "a setting without a type": (
        "own_g.py",
        {"own_g": METHOD.format(name="own-g") + "    rate = 0.5\n"},
        r"own_g.py:5: A non-annotated attribute was detected: `rate = 0.5`; settings have types, such as",
    ),
    "a taken name": (
        "own_t.py",
        {"own_t": METHOD.format(name="fedprox")},
        r"own_t.py: a method named 'fedprox' exists already \(rayfl.algorithms.fedprox\); choose",
    ),
    "a taken module": (
        "json.py",
        {"json": ""},
        r"plugins: json.py: there is another module named 'json' \(.*json/__init__.py\); rename the file",
    ),
    "a module that is not imported yet": ("this.py", {"this": ""}, r"another module named 'this'"),
    "a name that is none": (
        "own-x.py",
        {"own-x": ""},
        r"plugins: own-x.py: 'own-x' is not a module's name; rename",
    ),
    "half of a package": ("own_p.no", {"own_p_in___init__": ""}, r"no module named 'own_p.no' in"),
    "not text": ("own_n.py", {"own_n": "\x00"}, r"own_n.py"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_broken_plug_in_is_one_line(folder, kind):
    given, files, expected = BAD[kind]
    folder(**files)
    with pytest.raises(ConfigError, match=expected) as caught:
        load({**SMALL, "plugins": [given]})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["own.py", 3, [3], [""], {"a": 1}])
def test_plugins_is_a_list_of_names(folder, value):
    with pytest.raises(ConfigError, match=r"plugins(\.0)?: "):
        load({**SMALL, "plugins": value})


TARGETS = {
    "own_u": "is not a target",
    "own_u:": "is not a target",
    ":thing": "is not a target",
    "own_u:Thinf": "has no 'Thinf'; did you mean 'Thing'",
    "own_u:thing.deeper": "has no 'thing.deeper'",
    "own_v:thing": "no module named 'own_v'",
    "nets/own_v.py:thing": "no such file",
}


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_that_is_none(folder, target):
    folder(own_u="thing = 3\nclass Thing: pass")
    with pytest.raises(ConfigError, match=TARGETS[target]) as caught:
        plugins.resolve(target, "model.target")
    assert str(caught.value).startswith("model.target: ")


def test_targets(folder):
    folder(own_u="class A:\n    b = 3", nets_in_own_v="thing = 4")
    assert plugins.resolve("own_u:A.b", "x") == 3
    assert plugins.resolve("nets/own_v.py:thing", "x") == 4
    assert plugins.resolve("json:dumps", "x") is json.dumps
    assert [plugin.module for plugin in plugins.travelling()] == ["own_u", "own_v"]
    own_u = plugins.resolve("own_u:A", "x")
    assert plugins.target_of(own_u) == "own_u:A"
    with pytest.raises(ConfigError, match="other processes cannot import it"):
        plugins.target_of(lambda: 0)
    with pytest.raises(ConfigError, match=r"partial: has no name .*; put a function or class at the top"):
        plugins.target_of(functools.partial(own_u))


def test_a_file_that_changed_after_it_was_imported_is_refused(folder, monkeypatch):
    """As in a notebook that writes and imports a file twice: Python goes on with the first one."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    root = folder(own_twice="class A:\n    b = 3", own_once="class A:\n    b = 3")
    monkeypatch.syspath_prepend(str(root))
    for name in ("own_twice", "own_once"):
        importlib.import_module(name)
        os.utime(root / f"{name}.py", (1, 1))  # saved again without a change
    (root / "own_twice.py").write_text("class A:\n    b = 4  # another")
    assert plugins.resolve("own_once.py:A.b", "x") == 3
    with pytest.raises(ConfigError, match=r"own_twice.py: has changed since it was imported; restart Python"):
        plugins.resolve("own_twice.py:A.b", "x")


def test_a_run_keeps_its_plug_ins_and_notices_changes(folder):
    root = folder(own_e="import own_f\n" + METHOD.format(name="kept"), own_f="")
    first = run({**SMALL, "plugins": ["own_e.py"], "algorithm": "kept"})
    folder_of_sources = first.path / "plugins"
    assert sorted(path.name for path in folder_of_sources.iterdir()) == ["own_e.py", "own_f.py"]
    assert first.config.algorithm.name == "kept"
    forget()
    assert RunDirectory(first.path).config.algorithm.name == "kept"  # a new process: the file is there
    assert plugins.loaded()[0].folder == root

    forget()
    (root / "own_e.py").write_text(METHOD.format(name="kept") + "    more: int = 3\n")
    with pytest.raises(ConfigError, match=r"own_e.py: has changed since the run began; --changed-plugins"):
        resume(first.path, ["rounds=3"])
    assert RunDirectory(first.path).config.algorithm.model_dump() == {"name": "kept", "strength": 0.5}
    assert plugins.loaded()[0].folder == folder_of_sources  # who only reads takes what there was

    forget()
    resume(first.path, ["rounds=3"], changed_plugins=True)
    assert "more" in (folder_of_sources / "own_e.py").read_text()
    assert first.config.algorithm.model_dump()["more"] == 3

    forget()
    (root / "own_e.py").unlink()
    assert resume(first.path, ["rounds=4"]).rounds.shape[0] == 4  # it is gone: the run has it


def test_another_version_of_an_installed_package_is_refused_and_no_copy_promised(folder, monkeypatch):
    site = folder() / "site-packages"
    site.mkdir()
    (site / "own_up.py").write_text(METHOD.format(name="upgraded"))
    monkeypatch.syspath_prepend(str(site))
    first = run({**SMALL, "plugins": ["own_up"], "algorithm": "upgraded"})
    assert not (first.path / "plugins").exists()

    forget()
    (site / "own_up.py").write_text(METHOD.format(name="upgraded") + "    more: int = 3\n")
    with pytest.raises(ConfigError, match=r"own_up: has changed since .*; install the old version$"):
        resume(first.path, ["rounds=3"])
    forget()
    result = resume(first.path, ["rounds=3"], changed_plugins=True)
    assert result.config.algorithm.model_dump()["more"] == 3


def test_a_changed_sibling_is_named_and_a_failed_try_keeps_the_old_source(folder):
    mix = "    def mix(self, *given):\n        return mixed(super().mix(*given))\n"
    root = folder(
        own_w="from own_v import mixed\n" + METHOD.format(name="mixing") + mix,
        own_v="def mixed(m):\n    return m\n",
    )
    first = run({**SMALL, "plugins": ["own_w.py"], "algorithm": "mixing"})
    kept = first.path / "plugins" / "own_v.py"
    before = kept.read_text()

    forget()
    (root / "own_v.py").write_text("def mixed(m):\n    raise ValueError('no')\n")
    with pytest.raises(
        ConfigError, match=r"plug-in own_w.py: has changed since the run began \(own_v.py\); --ch"
    ):
        resume(first.path, ["rounds=3"])
    with pytest.raises(ValueError, match="no"):
        resume(first.path, ["rounds=3"], changed_plugins=True)
    assert kept.read_text() == before

    forget()
    (root / "own_v.py").write_text("def mixed(m):\n    return m  # new\n")
    resume(first.path, ["rounds=3"], changed_plugins=True)
    assert "new" in kept.read_text()
    forget()
    resume(first.path, ["rounds=4"])


NET = """
from torch import nn

class Net(nn.Module):
    age = "{age}"

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(64, 10)

    def forward(self, x):
        from own_lazy import age  # when the run is read it has been edited, too
        self.imported = age
        return self.last(x.flatten(1))
"""


@pytest.fixture
def edited(folder) -> Callable[[str], RunDirectory]:
    """A run with an own network, whose files are then edited, as a new process finds it."""

    def begin(target: str) -> RunDirectory:
        root = folder(own_net=NET.format(age="old"), own_lazy="age = 'old'\n")
        given = {"data": "digits", "model": {"name": "module", "target": target}, "rounds": 1}
        found = RunDirectory(run({**SMALL, **given}).path)
        forget()
        (root / "own_net.py").write_text(NET.format(age="edited"))
        (root / "own_lazy.py").write_text("age = 'edited'\n")
        sys.path.insert(0, str(root))  # as in a notebook, and of python -m
        return found

    return begin


@pytest.mark.parametrize("target", ["own_net.py:Net", "own_net:Net"])
def test_a_run_is_read_with_its_own_code_and_a_new_one_does_not_take_it(edited, target):
    before = edited(target)
    net = Result(before.path).model(cluster=0)
    assert net.age == "old"
    net(torch.zeros(1, 1, 8, 8))
    assert net.imported == "old"

    given = {**SMALL, "data": "digits", "model": {"name": "module", "target": target}}
    version = rf"the version saved in .*{before.path.name}, which differs from the present file"
    message = rf"^plug-in {target[:-4]}: this process has imported {version}; restart Python$"
    for source in (given, before.config):
        with pytest.raises(ConfigError, match=message):
            run(source)
    with pytest.raises(ConfigError, match=message):
        key_of(before.config)
    assert len(list(Path("runs").iterdir())) == 1
    assert Result(before.path).model(cluster=0).age == "old"

    for file in ("own_net.py", "own_lazy.py"):
        Path(file).write_bytes((before.path / "plugins" / file).read_bytes())
    assert load(given) == load(given)  # it is the same source again


def test_parts_of_a_run_that_was_read_are_not_those_of_an_edited_file(folder):
    root = folder(own_r=METHOD.format(name="reread"))
    given = {**SMALL, "plugins": ["own_r.py"], "algorithm": "reread"}
    path = run(given).path
    forget()
    (root / "own_r.py").write_text(METHOD.format(name="reread") + "    more: int = 3\n")
    before = RunDirectory(path).config
    for settings in (given, {**given, "plugins": ["own_r"]}, {**given, "plugins": []}):
        with pytest.raises(ConfigError, match=r"plug-in own_r(.py)?: this process has .*; restart Python"):
            load(settings)
    assert resume(path, ["rounds=3"]).rounds.shape[0] == 3  # the run goes on as it was
    (root / "own_r.py").unlink()
    assert load(given).algorithm == before.algorithm  # there is no other


@pytest.mark.parametrize("rayfl_knows", [True, False])
def test_a_run_is_not_read_with_a_newer_version_of_its_code(edited, rayfl_knows):
    before = edited("own_net.py:Net")
    if rayfl_knows:
        plugins.resolve("own_net.py:Net", "model.target")
    else:
        importlib.import_module("own_net")
    for read in (lambda: Result(before.path).model(cluster=0), lambda: list(client_models(before.path))):
        with pytest.raises(ConfigError, match=r"own_net.py: .*own_net.py, which differs from the version"):
            read()
    assert load({**SMALL, "plugins": ["own_net.py"]}).plugins  # the new one goes on


def test_nor_with_a_newer_version_of_what_its_code_imports(edited):
    before = edited("own_net.py:Net")
    importlib.import_module("own_lazy")
    with pytest.raises(ConfigError, match=r"own_lazy.py, which differs from the version.*restart Python"):
        _ = before.config


def test_other_versions_are_taken_only_while_a_run_is_resumed_with_them(edited):
    before = edited("own_net.py:Net")
    Path("own_net.py").write_text(NET.format(age="edited").replace("Linear(64, 10)", "Linear(64, 11)"))
    with pytest.raises(Exception, match="11"):
        resume(before.path, ["rounds=2"], changed_plugins=True)
    with pytest.raises(ConfigError, match="which differs from the version of"):
        _ = before.config


def test_a_new_plug_in_does_not_import_what_a_run_that_was_read_had(edited):
    assert Result(edited("own_net.py:Net").path).model(cluster=0)(torch.zeros(1, 1, 8, 8)) is not None
    Path("own_other.py").write_text("import own_lazy\n")
    with pytest.raises(ConfigError, match=r"own_other.py: it imports a file of which .*own_lazy.py"):
        bring(["own_other.py"])


def test_a_relative_file_is_another_one_in_another_folder(folder, monkeypatch):
    root = folder(a_in_own_q="x = 1", b_in_own_q="x = 2", c_in_own_q="x = 1")
    monkeypatch.chdir(root / "a")
    assert plugins.resolve("own_q.py:x", "x") == 1
    monkeypatch.chdir(root / "b")
    with pytest.raises(
        ConfigError, match=r"own_q.py: there is another .*a/own_q.py\); restart Python, or ren"
    ):
        plugins.resolve("own_q.py:x", "x")
    monkeypatch.chdir(root / "c")
    assert plugins.resolve("own_q.py:x", "x") == 1  # an equal one
    monkeypatch.chdir(root)
    assert plugins.resolve("own_q.py:x", "x") == 1  # none
    (root / "a" / "own_q.py").unlink()
    assert plugins.resolve("a/../a/own_q.py:x", "x") == 1  # it is gone


def test_changed_in_mid_process(folder):
    root = folder(own_g=METHOD.format(name="moving"))
    load({**SMALL, "plugins": ["own_g.py"]})
    (root / "own_g.py").write_text("")
    with pytest.raises(ConfigError, match=r"own_g.py: has changed since it was imported; restart Python"):
        load({**SMALL, "plugins": ["own_g.py"]})


def test_the_command_line(folder):
    folder(own_h=METHOD.format(name="typed"))
    assert _plugins_first(["list", "--plugin", "a", "x", "--plugin=b"]) == [
        "--plugin",
        "a",
        "--plugin=b",
        "list",
        "x",
    ]
    from rayfl.cli import app

    found = CliRunner().invoke(app, ["--plugin", "own_h.py", "list", "methods"])
    assert "typed" in found.output
    assert "FedAvg, my way." in found.output


def test_parts_as_objects(folder):
    folder(own_k=METHOD.format(name="object"))
    sys.path.append(str(Path.cwd()))
    own = importlib.import_module("own_k")
    half = load(SMALL, algorithm=own.Own(strength=0.25))
    assert half == load({**SMALL, "algorithm": {"name": "object", "strength": 0.25}})
    assert load(SMALL, ["algorithm.strength=0.75"], algorithm=own.Own).algorithm.strength == 0.75
    assert load(Config(algorithm=own.Own(strength=1))).algorithm.strength == 1
    assert [plugin.module for plugin in plugins.travelling()] == ["own_k"]
    assert run(SMALL, algorithm=own.Own).config.algorithm.name == "object"


@pytest.mark.parametrize("thing", [object(), 3, [1, 2], int, lambda: 0])
def test_objects_that_are_no_part(thing):
    with pytest.raises(ConfigError, match=r"^algorithm: got .*; expected "):
        load(SMALL, algorithm=thing)


def test_a_class_that_other_processes_cannot_import():
    class Hidden(FedAvg):
        name: Literal["hidden"] = "hidden"

    with pytest.raises(ConfigError, match="Hidden: other processes cannot import it; put it into a file"):
        load(SMALL, algorithm=Hidden)


def test_what_is_imported_later_belongs_to_a_plug_in_too(folder):
    folder(
        own_i="def f():\n    from own_late import x\n    import own_packed.deep",
        own_late="import own_later",
        own_later="",
        own_packed_in___init__="",
        own_packed_in_deep="this is not Python",
        own_free="",
    )
    bring(["own_i.py"])
    assert plugins.loaded()[0].files == (
        "own_i.py",
        "own_late.py",
        "own_later.py",
        "own_packed/__init__.py",
        "own_packed/deep.py",
    )


def test_a_link_is_a_module_of_its_own_name(folder, tmp_path):
    root = folder(shared_in_own_v3=METHOD.format(name="linked"))
    (root / "own_latest.py").symlink_to(root / "shared" / "own_v3.py")
    bring(["own_latest.py"])
    packed = tmp_path / "packed"
    packed.mkdir()
    assert [path.name for path in plugins.pack(packed)] == ["own_latest.py"]


def test_a_path_that_leads_nowhere_is_no_plug_in_that_is_there(folder):
    folder(own_here="")
    bring(["own_here.py"])
    with pytest.raises(ConfigError, match=r"nowhere/own_here.py: no such file"):
        bring(["nowhere/own_here.py"])


def test_a_script_that_starts_a_run_when_it_is_imported_is_refused(folder):
    folder(own_script="import rayfl\nrayfl.run('digits-demo')")
    with pytest.raises(ConfigError, match=r"own_script.py: starts a run when it is imported.*__main__"):
        bring(["own_script.py"])


RAISES = """
from typing import Literal
from rayfl.algorithms.fedavg import FedAvg
from rayfl.losses.cross_entropy import CrossEntropy

class Raises(FedAvg):
    '''FedAvg until its end.'''
    name: Literal["raises"] = "raises"

    def end(self, setup, state, plan, report):
        return helper({})

def helper(found):
    return found["missing"]

class Sour(CrossEntropy):
    '''No loss of a batch, but one of the few samples that it is tried with.'''
    name: Literal["sour"] = "sour"

    def each(self, outputs, targets):
        return super().each(outputs if len(outputs) < 4 else outputs.view(7, 7, 7), targets)
"""


@pytest.mark.parametrize(
    ("setting", "who", "lines", "error"),
    [
        ("algorithm=raises", "end", (11, 14), "KeyError: 'missing'"),
        ("loss=sour", "client 0 failed in round 1: each", (21,), "RuntimeError: shape '[7, 7, 7]' is"),
    ],
)
def test_an_error_in_own_code_is_a_line_after_the_own_lines(
    setting: str,
    who: str,
    lines: tuple[int, ...],
    error: str,
    folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The log of the run has the whole traceback."""
    root = folder(raising=RAISES)
    command = ["rayfl", "--plugin", "raising.py", "run", "digits-demo", setting, "execution.backend=inline"]
    monkeypatch.setattr(sys, "argv", [*command, "rounds=1", "output.report=false", "output.root=runs"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    err = capsys.readouterr().err
    *_, last = shown = err.splitlines()
    assert "Traceback" not in err
    file = root / "raising.py"
    assert last.startswith(f"error: {who}, {file}:{lines[-1]}: {error}")
    assert [line.split(", in ")[0].strip() for line in shown if ", in " in line] == [
        f"{file}:{n}" for n in lines
    ]
    (log,) = root.glob("runs/*/log.jsonl")
    failed = json.loads(log.read_text().splitlines()[-1])
    assert failed["event"] == "failed"
    assert failed["traceback"].startswith("Traceback")
    assert failed["traceback"].count("\n") > 8


def test_whose_an_error_is_follows_from_its_traceback() -> None:
    """Frames before the first of rayfl's started the command; an error of another process is its text."""
    ours = str(Path(plugins.__file__).parent / "api.py")
    frame = '  File "{}", line {}, in {}\n    {}\n'.format
    start, drive = frame("/home/me/bin/rayfl", 8, "<module>", "main()"), frame(ours, 3, "run", "end()")
    own, array = frame("/home/me/m.py", 5, "end", "a[9]"), frame(np.__file__, 7, "take", "no()")
    head = "Traceback (most recent call last):\n"
    chained = "\nDuring handling of the above exception, another exception occurred:\n\n"
    assert plugins.fault_of(ValueError(), f"{head}{start}{drive}ValueError: x\n") is None
    assert plugins.fault_of(ValueError(), f"{head}{own}{drive}ValueError: x\n") is None
    for text in (
        f"{head}{start}{drive}{own}{array}ValueError: x\n",
        f"{head}{drive}KeyError: 3\n{chained}{head}{start}{drive}{own}{array}ValueError: x\n",
    ):
        found = plugins.fault_of(ValueError(), text)
        assert found == plugins.Fault(
            ("/home/me/m.py:5, in end: a[9]",), "end, /home/me/m.py:5: ValueError: x"
        )

    class RayTaskError(Exception):
        """As Ray's."""

        cause = ValueError("two\nlines")

    found = plugins.fault_of(RayTaskError(f"ray::Driver.run() (pid=3)\n{drive}{own}ValueError: two\nlines"))
    assert found is not None
    assert found.line == "end, /home/me/m.py:5: ValueError: two lines"
