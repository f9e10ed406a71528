"""Plug-ins: modules with the user's own parts, networks and data.

A plug-in is a module, given by its name or as a file. Each class in it that is a part with a name becomes a
choice like rayfl's own parts; a package may also contain presets, as YAML files in its folder ``presets``.
Plug-ins are named in a config (``plugins: [my_method, nets/my_net.py]``), on the command line (``--plugin``),
in the environment (``RAYFL_PLUGINS``, separated by commas), by installed packages (entry points of the group
``rayfl.parts``), and by targets such as ``model.target: my_net:MyNet``.

What a plug-in imports from its own folder belongs to it: it is sent to the workers of a cluster, copied into
the run directory, and included in the hash that detects a changed plug-in. Installed packages are not sent;
the cluster must have them, as it must have rayfl.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import marshal
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from rayfl.errors import ConfigError, RayflError, nearest
from rayfl.settings import Registry, Section, part_name, parts_of

ENTRY_POINTS = "rayfl.parts"
"""The group of entry points through which an installed package provides parts."""

ENVIRONMENT = "RAYFL_PLUGINS"
"""The variable that names plug-ins, separated by commas."""


@dataclass(frozen=True)
class Plugin:
    """A module from outside of rayfl that has been imported.

    Attributes:
        module: its name in Python.
        given: its name or path as the user wrote it.
        folder: the folder of its top module; None if it has no source.
        files: the source files that belong to it, below the folder, sorted.
        sha256: of these files and their names.
        installed: whether it is an installed package, which is not copied.
    """

    module: str
    given: str
    folder: Path | None
    files: tuple[str, ...]
    sha256: str
    installed: bool = False

    def to_dict(self) -> dict[str, Any]:
        """For ``plugins.json``."""
        return {
            "module": self.module,
            "given": self.given,
            "folder": None if self.folder is None else str(self.folder),
            "files": list(self.files),
            "sha256": self.sha256,
            "installed": self.installed,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plugin:
        """The inverse of :meth:`to_dict`.

        Raises:
            KeyError, TypeError: if the data are not of that form.
        """
        folder = values["folder"]
        return cls(
            str(values["module"]),
            str(values["given"]),
            None if folder is None else Path(folder),
            tuple(map(str, values["files"])),
            str(values["sha256"]),
            bool(values["installed"]),
        )

    def now(self) -> Plugin | None:
        """The same plug-in with the hash of its current files; None if one of them is gone."""
        if self.folder is None:
            return self
        try:
            return replace(self, sha256=_hash(self.folder, self.files))
        except OSError:
            return None

    def source(self) -> dict[str, bytes]:
        """Its files by name; empty for an installed package.

        Raises:
            OSError
        """
        if self.folder is None or self.installed:
            return {}
        return {name: (self.folder / name).read_bytes() for name in self.files}

    @property
    def named(self) -> str:
        """The module's name, or the absolute path of its file: what names it in any folder."""
        if self.folder is None or self.installed or not _is_file(self.given):
            return self.given
        return str(self.folder / Path(self.given).name)


_loaded: dict[str, Plugin] = {}
"""The plug-ins of this process by module, in the order in which they were imported."""

_restored: dict[str, Path] = {}
"""The plug-ins restored from earlier runs, each with the run's directory; for that run a restored plug-in
replaces the present file at the path that the user named then.
"""


class _Finder:
    """Finds the modules that restored plug-ins import next to their sources, also for imports in functions.

    Without it Python would search the folders of these plug-ins last, after the current folder, which may
    contain newer versions.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """The spec of a top-level module of a restored plug-in; None for all others (the finder protocol)."""
        if path is not None:
            return None
        for module in _restored.keys() & _loaded.keys() - _sent_modules():
            plugin = _loaded[module]
            if plugin.folder is None or plugin.installed or name not in _top_modules(plugin):
                continue
            usual = PathFinder.find_spec(name)
            if name not in sys.stdlib_module_names and not (
                usual and usual.origin and _is_installed(Path(usual.origin))
            ):
                return PathFinder.find_spec(name, [str(plugin.folder)])
        return None


def _top_modules(plugin: Plugin) -> set[str]:
    """The top modules among the files of a plug-in."""
    return {name.partition("/")[0].removesuffix(".py") for name in plugin.files}


def loaded() -> tuple[Plugin, ...]:
    """The plug-ins of this process, in the order in which they were imported."""
    return tuple(_loaded.values())


def presets() -> dict[str, Path]:
    """The presets of plug-ins that are, or are part of, a package: its ``presets/*.yaml``, by name."""
    paths: dict[str, Path] = {}
    for plugin in loaded():
        steps = plugin.module.split(".")
        for name in (".".join(steps[:k]) for k in range(len(steps), 0, -1)):
            for folder in getattr(sys.modules[name], "__path__", ()):
                for path in sorted(Path(folder, "presets").glob("*.yaml")):
                    paths.setdefault(path.stem, path)
    return paths


def load(named: Iterable[str], registries: Iterable[Registry[Any]]) -> None:
    """Import plug-ins and register their parts; a plug-in is imported only once.

    Args:
        named: modules or files.
        registries: that may receive parts.

    Raises:
        ConfigError: if one cannot be imported, with its file, line and error; or if the name of a part is
            already taken.
    """
    for given in named:
        _register_parts(_import_plugin(given, "plugins"), registries)


def restore(
    recorded: Plugin,
    folder: Path | None,
    run: Path,
    registries: Iterable[Registry[Any]],
    changed: bool = False,
) -> None:
    """Import a plug-in of an earlier run, or use the one of this process if it is the same.

    Args:
        recorded: its entry in ``plugins.json``.
        folder: where its files are now; None for an installed package.
        run: the run directory.
        registries: that may receive parts.
        changed: also accept another version of it.

    Raises:
        ConfigError: as :func:`load`; or if this process has imported another version, which might build
            other models than the run's.
    """
    name = recorded.module
    if fresh := name not in _loaded:
        folder = None if folder is None else Path(os.path.abspath(folder))  # also after os.chdir
        _restored[name] = Path(os.path.abspath(run))
        _loaded[name] = recorded if folder is None else replace(recorded, folder=folder)  # where to find it
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        importlib.invalidate_caches()
        try:
            _loaded[name] = _plugin_of(
                _import_module(name, recorded.given, "plugins", folder), recorded.given
            )
        except BaseException:
            _forget(name)
            raise
    if not changed and name not in _sent_modules():
        other_file = _differing_file(recorded)
        if other_file is not None:
            if fresh:
                _forget(name)
            raise ConfigError(
                f"plug-in {recorded.given}",
                f"this process has imported {other_file}, which differs from the version of {run}",
                "restart Python, and read the run before importing that file",
            )
    _register_parts(sys.modules[name], registries)


_finder: Any = _Finder()


def _forget(name: str) -> None:
    """Undo the registration of a restored plug-in."""
    del _loaded[name], _restored[name]


def _differing_file(recorded: Plugin) -> str | None:
    """A file of this process that differs from the one that a run recorded; None if none does.

    Installed packages are not compared: the run has no copy of them, so a restart would not restore them.
    """
    imported = _loaded[recorded.module]
    if recorded.installed or imported.installed or imported.folder is None:
        return None
    # In the run's folder of sources, files of other plug-ins may also belong to this one.
    if imported.sha256 != recorded.sha256 and not (
        imported.now() == imported and _hash_in(imported.folder, recorded.files) == recorded.sha256
    ):
        return str(getattr(sys.modules[recorded.module], "__file__", recorded.module))
    return _stray_file(imported)


def _is_outdated(module: ModuleType) -> bool:
    """Whether a module was imported before its file was changed, as in a notebook that writes the file again.

    Python keeps what it compiled when it imported the file. Where it does not, nothing is known.
    """
    loader = getattr(module.__spec__, "loader", None)
    file = getattr(module, "__file__", None)
    if type(loader) is not SourceFileLoader or file is None or sys.dont_write_bytecode:
        return False
    with contextlib.suppress(OSError, ValueError, TypeError, EOFError, SyntaxError, NotImplementedError):
        compiled = Path(importlib.util.cache_from_source(file))
        if os.access(compiled.parent, os.W_OK):
            imported = marshal.loads(compiled.read_bytes()[_HEADER:])
            return bool(imported != compile(Path(file).read_bytes(), file, "exec", dont_inherit=True))
    return False


_HEADER = 16
"""Bytes before the code in a file of compiled Python."""


def _stray_file(plugin: Plugin) -> str | None:
    """The file of an imported module with the name of a plug-in's file, but other contents; None if none."""
    if plugin.folder is None or plugin.installed or plugin.module in _sent_modules():
        return None
    for file in plugin.files:
        name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        module_file = getattr(sys.modules.get(name), "__file__", None)
        plugin_file = plugin.folder / file
        if (
            module_file is None
            or os.path.abspath(module_file) == str(plugin_file)
            or _is_installed(Path(module_file))
        ):
            continue
        try:
            same = Path(module_file).read_bytes() == plugin_file.read_bytes()
        except OSError:
            same = False
        if not same:
            return str(module_file)
    return None


def refuse_old(named: Iterable[str]) -> None:
    """Refuse plug-ins of which this process has imported an old version in order to read an earlier run.

    Args:
        named: modules and files, or targets in them, that the config of a new run names.

    Raises:
        ConfigError: if a new process would import other code.
    """
    if not _restored:
        return
    for given in named:
        source = given.rpartition(":")[0] or given
        is_file = _is_file(source)
        top = Path(source).stem if is_file else source.partition(".")[0]
        for module, run in _restored.items():
            if module not in _loaded or module.partition(".")[0] != top or module in _sent_modules():
                continue
            plugin = _loaded[module]
            folder = _folder_of(source) if is_file else _folder_without_restored(top)
            if plugin.installed or folder is None or _hash_in(folder, plugin.files) == plugin.sha256:
                continue
            raise ConfigError(
                f"plug-in {source}",
                f"this process has imported the version saved in {run}, which differs from the present file",
                "restart Python",
            )


def _folder_of(given: str) -> Path | None:
    """The folder in which a file lies; None if there is none."""
    path = Path(os.path.abspath(os.path.expanduser(given)))
    return path.parent if path.is_file() else None


def _folder_without_restored(top: str) -> Path | None:
    """The folder in which a process that has read no run would find a module; None if it would find none."""
    restored_sources = {str(run / "plugins") for run in _restored.values()}
    paths = [os.path.abspath(path) for path in sys.path]
    spec = PathFinder.find_spec(top, [*(path for path in paths if path not in restored_sources), os.getcwd()])
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).parent
    return Path(spec.origin).parent if spec.origin else None


def _hash_in(folder: Path, files: Sequence[str]) -> str | None:
    """The hash of files in a folder; None if one is missing."""
    try:
        return _hash(folder, files)
    except OSError:
        return None


def load_everywhere(registries: Iterable[Registry[Any]]) -> None:
    """Import the plug-ins that the environment and installed packages name.

    Raises:
        ConfigError: as :func:`load`.
    """
    names = [name.strip() for name in os.environ.get(ENVIRONMENT, "").split(",") if name.strip()]
    load([*names, *_entry_points()], registries)


@cache
def _entry_points() -> tuple[str, ...]:
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return tuple(sorted({point.module for point in points}))


def adopt(modules: Iterable[str], registries: Iterable[Registry[Any]]) -> None:
    """In a worker: register the parts of plug-ins that were sent here, by module name."""
    for name in modules:
        _register_parts(importlib.import_module(name), registries)


def resolve(target: str, where: str) -> Any:
    """The object that a target names.

    Args:
        target: ``module:attribute`` or ``path/to/file.py:attribute``; the attribute may be dotted.
        where: the setting, for messages.

    Raises:
        ConfigError: if there is no such module or attribute, or its module cannot be imported.
    """
    source, colon, attribute = target.rpartition(":")
    if not colon or not source or not attribute:
        raise ConfigError(where, f"{target!r} is not a target", "give module:name or path/to/file.py:name")
    module = _import_plugin(source, where)
    value: Any = module
    for step in attribute.split("."):
        if not hasattr(value, step):
            own_names = [
                n for n, each in vars(module).items() if getattr(each, "__module__", None) == module.__name__
            ]
            raise ConfigError(where, f"{source} has no {attribute!r}", nearest(attribute, own_names))
        value = getattr(value, step)
    return value


def module_of(target: str) -> str:
    """The name of the module of a target: ``my_net`` for ``nets/my_net.py:Net``, ``nets.mine`` for
    ``nets.mine:Net``.
    """
    return _module_name(target.rpartition(":")[0])


def _module_name(given: str) -> str:
    """The name of a module that is given by its name or as a file."""
    return Path(given).stem if _is_file(given) else given


def target_of(thing: Any) -> str:
    """The target that names a class or function.

    Raises:
        ConfigError: if no other process could import it, because it is defined in a notebook or a function.
    """
    if not hasattr(thing, "__qualname__"):  # functools.partial, an object that can be called
        remedy = "put a function or class at the top level of a file, and its arguments into kwargs"
        raise ConfigError(
            type(thing).__name__, "has no name by which other processes could import it", remedy
        )
    module, name = thing.__module__, thing.__qualname__
    if module == "__main__":
        file = getattr(sys.modules["__main__"], "__file__", None)
        module = str(Path(file).resolve()) if file else ""
    if not module or "<" in name:  # <locals>, <lambda>
        raise ConfigError(
            name, "other processes cannot import it", "put it into a file of its own, at the top level"
        )
    return f"{module}:{name}"


def _import_plugin(given: str, where: str) -> ModuleType:
    """Import a module by its name or its file, and remember it as a plug-in."""
    is_file, name = _is_file(given), _module_name(given)
    if name.partition(".")[0] == __name__.partition(".")[0]:
        return _import_module(name, given, where, None)
    if name not in _loaded or (is_file and not _same_file(name, given)):
        folder = Path.cwd()
        if is_file and name not in _sent_modules():
            _check_file(given, name, where)
            # The folder of a link, not of its target
            folder = Path(os.path.abspath(os.path.expanduser(given))).parent
        plugin = _plugin_of(_import_module(name, given, where, folder), given)
        if _is_outdated(sys.modules[name]):
            raise ConfigError(where, f"{given}: has changed since it was imported", "restart Python")
        if (stray := _stray_file(plugin)) is not None:
            what = f"{given}: it imports a file of which this process has another version ({stray})"
            raise ConfigError(where, what, "restart Python, or rename the file")
        _loaded[name] = plugin
        _restored.pop(name, None)
    elif not _loaded[name].installed and _loaded[name].now() not in (None, _loaded[name]):
        raise ConfigError(where, f"{given}: has changed since it was imported", "restart Python")
    return sys.modules[name]


def _is_file(given: str) -> bool:
    """Whether a plug-in is given as a file, and not by its name."""
    return given.endswith(".py") or os.sep in given


def _same_file(name: str, given: str) -> bool:
    """Whether a module was imported from this file, even if it no longer exists, or from an equal one."""
    if name in _restored or name in _sent_modules():
        return True
    plugin, file = _loaded[name], getattr(sys.modules[name], "__file__", None)
    path = Path(os.path.abspath(os.path.expanduser(given)))  # the same name is another file in another folder
    if file is not None and os.path.abspath(file) == str(path):
        return True
    if not path.is_file():
        return plugin.given == given
    if file is not None and path.resolve() == Path(file).resolve():
        return True
    return path.name in plugin.files and _hash_in(path.parent, plugin.files) == plugin.sha256


def _sent_modules() -> frozenset[str]:
    """Modules that were sent to this worker; their files need not be at the path that the user named."""
    return frozenset(filter(None, os.environ.get(_SENT_VARIABLE, "").split(",")))


_SENT_VARIABLE = "RAYFL_TRAVELLED_PLUGINS"


def travelling() -> tuple[Plugin, ...]:
    """The plug-ins of this process whose source must be sent to workers."""
    return tuple(plugin for plugin in loaded() if plugin.folder is not None and not plugin.installed)


def pack(folder: Path) -> list[Path]:
    """Copy the source of the plug-ins that must be sent to a folder.

    Returns:
        The files and packages in it, which must be importable on a worker.

    Raises:
        OSError
    """
    for plugin in travelling():
        for name, content in plugin.source().items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    return sorted(folder.iterdir())


def variables() -> dict[str, str]:
    """Environment variables for workers, which name the plug-ins that have been sent to them."""
    return {_SENT_VARIABLE: ",".join(plugin.module for plugin in travelling())}


def _check_file(given: str, name: str, where: str) -> None:
    path = Path(given).expanduser()
    if not path.is_file():
        raise ConfigError(where, f"{given}: no such file")
    if not name.isidentifier():
        raise ConfigError(
            where, f"{given}: {name!r} is not a module's name", "rename the file, e.g. my_method.py"
        )
    if name in sys.modules:
        existing = getattr(sys.modules[name], "__file__", None)
    else:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            if spec is None:
                return
            existing = spec.origin
    if existing is None or Path(existing).resolve() != path.resolve():
        remedy = "restart Python, or rename the file" if name in _loaded else "rename the file"
        raise ConfigError(where, f"{given}: there is another module named {name!r} ({existing})", remedy)


def _import_module(name: str, given: str, where: str, folder: Path | None) -> ModuleType:
    if folder is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))  # last, so that it hides no other module
        importlib.invalidate_caches()
    _importing.append(given)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for the result of a command
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name + ".").startswith(error.name + "."):
            what = f"no module named {name!r} in the current folder or among the installed packages"
            raise ConfigError(where, what) from None
        raise broken(error, given) from None
    except (Exception, SystemExit) as error:
        raise broken(error, given) from None
    finally:
        _importing.pop()


_importing: list[str] = []


def refuse_while_importing() -> None:
    """Refuse a run that a plug-in starts on import: each process of the run would import and start it again.

    Raises:
        ConfigError: if a plug-in is being imported.
    """
    if _importing:
        raise ConfigError(
            _importing[-1],
            "starts a run when it is imported, and every process of that run would import it again",
            'put the call below: if __name__ == "__main__":',
        )


def broken(error: BaseException, given: str) -> ConfigError:
    """An error with the file, line and message of a failure in a user's code."""
    where = f"plug-in {given}"
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, SyntaxError) and error.filename:
        return ConfigError(f"{error.filename}:{error.lineno}", f"not Python: {error.msg}")
    package_folder = str(Path(__file__).parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((package_folder, "<")) and "importlib" not in frame.filename
    ]
    if frames:
        where = f"{frames[-1].filename}:{frames[-1].lineno}"
        for frame in reversed(frames):  # the innermost line of the user's own code
            if not _is_installed(Path(frame.filename)):
                where = f"{frame.filename}:{frame.lineno}"
                break
    text = " ".join(str(error).split())
    if isinstance(error, PydanticUserError):  # such as a setting without a type
        sentence = re.split(r"\.\s|;| For further", text)[0]
        if isinstance(error, PydanticSchemaGenerationError):
            return ConfigError(
                where, sentence, "settings are numbers, text, true or false, lists and sections"
            )
        return ConfigError(where, sentence, "settings have types, such as factor: float = 1.0")
    return ConfigError(where, f"{type(error).__name__}: {text}" if text else type(error).__name__)


@dataclass(frozen=True)
class Fault:
    """An error that was raised within the user's own code: a hook, a loss, a network.

    Attributes:
        frames: the lines of the user's code in the traceback, the outermost first.
        line: the outermost function and the innermost line of the user's code, and the error.
    """

    frames: tuple[str, ...]
    line: str


def fault_of(error: BaseException, text: str = "") -> Fault | None:
    """The fault in the user's code that a traceback shows; None if it contains no user code called by rayfl.

    Args:
        error: what was raised; the text of an error of Ray contains the traceback of the other process.
        text: the traceback, if not that of ``error``.
    """
    if text:
        what = (text.strip().splitlines() or ["unknown cause"])[-1]
    else:
        text = "".join(traceback.format_exception(error))
        remote = any(kind.__name__ == "RayTaskError" for kind in type(error).__mro__)
        cause = getattr(error, "cause", error) if remote else error
        message = " ".join(str(cause).split())
        what = f"{type(cause).__name__}: {message}" if message else type(cause).__name__
    for part in reversed(_CHAINED.split(text)):
        rows = _FRAME.findall(part)
        start = next((place for place, row in enumerate(rows) if _is_rayfl(row[0])), len(rows))
        own_rows = [row for row in rows[start:] if not (_is_rayfl(row[0]) or _is_installed(Path(row[0])))]
        if own_rows:
            frames = tuple(f"{file}:{line}, in {name}: {code.strip()}" for file, line, name, code in own_rows)
            return Fault(frames, f"{own_rows[0][2]}, {own_rows[-1][0]}:{own_rows[-1][1]}: {what}")
    return None


_FRAME = re.compile(r'^ *File "([^"<\n]+)", line (\d+), in (\S+)\n(?! *File ")((?: {4}.*)?)', re.MULTILINE)
"""File, line, function and code of a frame in a traceback."""

_CHAINED = re.compile(
    r"^(?:During handling of the above|The above exception was the direct).*$", re.MULTILINE
)


def _is_rayfl(file: str) -> bool:
    """Whether a file is one of rayfl's."""
    return Path(file).is_relative_to(Path(__file__).parent)


def call_part(part: object, method: str, *args: Any) -> Any:
    """Call a method of a part before a run; an error in a user's part becomes one line with file and line.

    Raises:
        ConfigError: in place of any error of a part that does not come with rayfl.
    """
    try:
        return getattr(part, method)(*args)
    except RayflError:
        raise
    except Exception as error:
        if is_own(part):
            raise
        if isinstance(error, NotImplementedError) and method not in vars(type(part)):
            name = getattr(part, "name", type(part).__name__)
            raise ConfigError(f"{name}.{method}", f"is missing in class {type(part).__name__}") from error
        raise broken(error, type(part).__module__) from error


def is_own(part: object) -> bool:
    """Whether a part comes with rayfl."""
    return type(part).__module__.partition(".")[0] == __name__.partition(".")[0]


def _register_parts(module: ModuleType, registries: Iterable[Registry[Any]]) -> None:
    """Register the parts of a module with the registries of their kinds."""
    for registry in registries:
        for part in parts_of(module, registry.base):
            try:
                registry.register(part)
            except ValueError as error:
                file = inspect.getsourcefile(part) or module.__name__
                raise ConfigError(file, str(error)) from None


def nameless(base: type) -> list[str]:
    """Classes of a kind in the loaded plug-ins that cannot be chosen, because they have no name, and of which
    no other class is derived."""
    modules = [sys.modules[plugin.module] for plugin in loaded() if plugin.module in sys.modules]
    return [
        name
        for module in modules
        for name, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, base) and issubclass(cls, Section) and not cls.__subclasses__()
        if cls.__module__ == module.__name__ and part_name(cls) is None
    ]


def _plugin_of(module: ModuleType, given: str) -> Plugin:
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py"):
        return Plugin(module.__name__, given, None, (), "", installed=True)
    # The folder above the top package, which must be on the path.
    depth = module.__name__.count(".") + (Path(file).name == "__init__.py")
    folder = Path(os.path.abspath(file)).parents[depth]
    installed = _is_installed(folder / "x")
    if installed:
        files = sorted(_package_files(module, folder))
    else:
        files = sorted({path.relative_to(folder).as_posix() for path in _imported_files(module, folder)})
    return Plugin(module.__name__, given, folder, tuple(files), _hash(folder, files), installed)


def _package_files(module: ModuleType, folder: Path) -> Iterator[str]:
    """The files of an installed package."""
    top = sys.modules[module.__name__.partition(".")[0]]
    paths = [Path(p) for p in getattr(top, "__path__", ())]
    for path in paths:
        yield from (each.relative_to(folder).as_posix() for each in path.rglob("*.py"))
    if not paths:
        yield Path(os.path.abspath(str(module.__file__))).relative_to(folder).as_posix()


def _imported_files(module: ModuleType, folder: Path) -> set[Path]:
    """The files of a module and of all that it imports, directly or not, from its own folder.

    This includes imports within functions, which need not have been executed yet.
    """
    files: set[Path] = set()
    pending = [module.__name__]
    while pending:
        steps = pending.pop().split(".")
        for k in range(1, len(steps) + 1):
            stem = folder.joinpath(*steps[:k])
            for path in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")):
                if path not in files and path.is_file() and _belongs_to_plugin(path, folder):
                    files.add(path)
                    pending += _imported_names(".".join(steps[:k]), path)
    return files


def _belongs_to_plugin(path: Path, folder: Path) -> bool:
    rayfl = Path(__file__).resolve().parent
    return (
        path.suffix == ".py"
        and path.is_relative_to(folder)
        and not path.is_relative_to(rayfl)
        and not _is_installed(path)
    )


def _imported_names(name: str, path: Path) -> Iterator[str]:
    """The dotted names that a module imports anywhere in its code."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # it has not been imported and cannot be
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            yield from _named_import(node, package)


def _named_import(call: ast.Call, package: str) -> Iterator[str]:
    """The module that ``importlib.import_module("name")`` or ``__import__("name")`` imports."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function not in ("import_module", "__import__") or not call.args:
        return
    name = getattr(call.args[0], "value", None)  # of a constant
    if isinstance(name, str):
        with contextlib.suppress(ImportError, ValueError):  # such as a relative name that leaves the package
            yield importlib.util.resolve_name(name, package)


@cache
def _installed_folders() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    locations = {paths[key] for key in ("purelib", "platlib", "stdlib", "platstdlib")}
    return tuple(Path(each).resolve() for each in locations)


def _is_installed(path: Path) -> bool:
    """Whether a file belongs to Python itself or to an installed package."""
    if {"site-packages", "dist-packages"} & set(path.parts):
        return True
    return any(path.is_relative_to(each) for each in _installed_folders())


def _hash(folder: Path, files: Sequence[str]) -> str:
    """The SHA-256 of the names and contents of files, as hex digits.

    Raises:
        OSError
    """
    digest = hashlib.sha256()
    for name in files:
        content = (folder / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
