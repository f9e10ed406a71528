"""Run directories on object storage: ``output.root: s3://bucket/runs``, ``gs://...``, ``abfs://...``, or
``file:///...``.

A run works in a local folder, its *staging folder*, and is published from there after every checkpoint and at
the end. Object stores cannot rename, so the order of writes replaces a rename: a checkpoint's
``manifest.json`` is written after all files that it lists and removed before them; ``summary.json``, which
marks a run as finished, comes last. An earlier checkpoint is removed only when the next one is complete, so a
concurrent reader always finds one.

They have no locks either. A process that wants to write to a run puts an object of its own, a *lease*, below
``.lease/``, and gives up if it then sees the lease of another live process. Listings of S3, GCS and Azure
contain everything written before, so of two processes at least one sees the other; both may give up. A lease
is written again every few seconds, with the run's status for observers. If it has not changed for a minute
its process is considered dead, and the next process removes it and leaves a mark. A process that was only
suspended for that long may write its lease again, but notices the mark before it publishes, and stops. The
one case that this cannot exclude is a process that is suspended for a minute in the middle of publishing.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import parse_qsl, quote

from filelock import FileLock, Timeout

from rayfl import files
from rayfl.errors import DiskError, Held, not_a_run
from rayfl.machine import machine_id, process_start

SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "file")
"""Schemes of URLs of object storage, and of file systems without locks."""

URL = rf"^({'|'.join(SCHEMES)}):/"
"""The beginning of the URL of a remote root. ``Path`` collapses its two slashes to one."""

_ROOT_FILE, _PUBLISHED, _LEASE = ".remote", ".published.json", ".lease"
"""Files in a staging folder: the URL of its root, the record of what has been published, and the name of this
process's lease below ``.lease/`` in the remote directory."""

_TAKEN = f"{_LEASE}/taken"
"""Folder of the marks of leases that other processes have removed; they stay."""

_LEASE_INTERVAL = 10.0
"""Seconds between two writes of a lease."""

_DEAD_AFTER = 60.0
"""Seconds without a change after which the process of a lease is considered dead."""

_CHECK_INTERVAL = 1.0
"""Seconds between two checks of the leases of others, or of a lock."""

_PATIENCE = 600
"""How often a lock is checked before the process that has it is considered stuck."""

_ATTEMPTS = 5
"""How many times an object or a run is read, if it is replaced while it is read."""

_own_leases: set[str] = set()
"""The leases that this process holds; not those that it has given up but could not remove."""

_OPTIONS = {"s3": "allow_delayed_open=true", "gs": "retry_limit_seconds=30", "gcs": "retry_limit_seconds=30"}
"""Options added to URLs that do not set them. S3 then takes one request instead of three for a small file,
and Google's client does not try for 15 minutes to reach an endpoint that does not answer."""

_NO_BUCKET = re.compile("AWS Error NO_SUCH_BUCKET|NOT_FOUND: .*specified bucket does not exist")
_FORBIDDEN = re.compile(r"AWS Error ACCESS_DENIED|Status\((PERMISSION_DENIED|UNAUTHENTICATED): ")
_UNREACHABLE = re.compile(r"AWS Error NETWORK_CONNECTION|Status\(UNAVAILABLE: ")
"""Patterns in the error messages of storages."""

_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_")


def is_url(text: object) -> bool:
    """Whether a path is on object storage."""
    return re.match(URL, str(text)) is not None


def plain(path: object) -> str:
    """A path as shown to users; a URL without its options, and with both slashes (``Path`` removes one)."""
    return "{}://{}".format(*_scheme_and_rest(str(path))).partition("?")[0] if is_url(path) else str(path)


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that hold credentials for object storage."""
    return {name: value for name, value in environment.items() if name.startswith(_VARIABLES)}


def staging(root: str) -> Path:
    """The local staging folder of the runs of a root: below ``$RAYFL_STAGING``, else
    ``~/.cache/rayfl/staging``.

    Buckets of the same name at different endpoints have different folders.
    """
    configured = os.environ.get("RAYFL_STAGING")
    folder = Path(configured) if configured else Path.home() / ".cache" / "rayfl" / "staging"
    scheme, rest = _scheme_and_rest(root)
    path, _, query = rest.partition("?")
    endpoint = dict(parse_qsl(query)).get("endpoint_override")
    if endpoint is None and scheme == "s3":
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    suffix = f"@{endpoint}" if endpoint else ""
    return folder.absolute() / scheme / quote(f"{path.strip('/')}{suffix}", safe="@")


def split(url: str) -> tuple[str, str]:
    """Split the URL of a run into the URL of its root and its name."""
    scheme, rest = _scheme_and_rest(url)
    path, mark, query = rest.partition("?")
    root, _, name = path.rstrip("/").rpartition("/")
    return f"{scheme}://{root}{mark}{query}", name


def _scheme_and_rest(url: str) -> tuple[str, str]:
    scheme, _, rest = url.partition(":")
    return scheme, ("/" if scheme == "file" else "") + rest.lstrip("/")


def runs(root: str) -> dict[str, float]:
    """The start times of the runs below a root, in seconds since 1970, by name.

    Raises:
        DiskError: if the storage does not answer.
    """
    from pyarrow import fs

    remote = Remote(root, "")
    with remote._storage_errors():
        system, path = remote._location
        # On GCS pyarrow lists no folders (apache/arrow#35993).
        flat = system.type_name == "gcs"
        selector = fs.FileSelector(path.rstrip("/"), recursive=flat, allow_not_found=True)
        infos = system.get_file_info(selector)
        if not flat:
            folders = [info.base_name for info in infos if info.type == fs.FileType.Directory]
            infos = system.get_file_info([f"{path}{name}/config.yaml" for name in folders])
        if not infos:
            remote._require_bucket()
    config = re.compile(rf"{re.escape(path)}([^/]+)/config\.yaml")
    files = ((config.fullmatch(info.path), info) for info in infos if info.type == fs.FileType.File)
    return {match[1]: info.mtime.timestamp() for match, info in files if match}


def newest(root: str) -> str | None:
    """The URL of the run below a root that started last; None if there is none.

    Raises:
        DiskError: if the storage does not answer.
    """
    start_times = runs(root)
    return (
        Remote(root, max(start_times, key=lambda name: (start_times[name], name))).url
        if start_times
        else None
    )


class Entry(NamedTuple):
    """An object, as a listing shows it.

    Attributes:
        size: bytes.
        written: when it was written, by the storage's clock (seconds since 1970).
    """

    size: int
    written: float


class Remote:
    """The remote directory in which a run is published.

    Args:
        root: the URL of the folder of all runs.
        name: of the run.
    """

    def __init__(self, root: str, name: str) -> None:
        self.root, self.name = root, name

    def __str__(self) -> str:
        return self.url.partition("?")[0]

    @property
    def url(self) -> str:
        """The URL of the run, with the options of the root's URL."""
        scheme, rest = _scheme_and_rest(self.root)
        path, mark, query = rest.partition("?")
        return f"{scheme}://{path.rstrip('/')}/{self.name}{mark}{query}"

    @classmethod
    def of(cls, folder: Path) -> Remote | None:
        """The remote directory of the run in this staging folder; None if it is not a staging folder."""
        note = folder / _ROOT_FILE
        return cls(note.read_text(encoding="utf-8"), folder.name) if note.is_file() else None

    def claim(self, folder: Path) -> None:
        """Mark a folder as the staging folder of this run."""
        files.write(folder / _ROOT_FILE, self.root)

    @cached_property
    def _location(self) -> tuple[Any, str]:
        from pyarrow import fs

        scheme, rest = _scheme_and_rest(self.root)
        option = _OPTIONS.get(scheme, "")
        if option.partition("=")[0] not in rest:
            rest += f"{'&' if '?' in rest else '?'}{option}"
        system, path = fs.FileSystem.from_uri(f"{scheme}://{rest}")
        return system, f"{path.rstrip('/')}/{self.name}"

    def is_run(self) -> bool:
        """Whether there is a run at this URL; never true for a bucket itself.

        Raises:
            DiskError: if the storage does not answer.
        """
        scheme, rest = _scheme_and_rest(self.root)
        if scheme != "file" and not rest.partition("?")[0].strip("/"):
            return False
        from pyarrow import fs

        with self._storage_errors():
            system, path = self._location
            (info,) = system.get_file_info([f"{path}/config.yaml"])
            if info.type == fs.FileType.NotFound:
                self._require_bucket()
        return bool(info.type == fs.FileType.File)

    def _require_bucket(self) -> None:
        """Raise the storage's error if the bucket does not exist: pyarrow then just finds no files."""
        from pyarrow import fs

        system, path = self._location
        folder = fs.FileSelector(path.rstrip("/"), allow_not_found=False)
        try:
            system.get_file_info(folder)
        except FileNotFoundError as error:  # GCS raises it also for a bucket that does not exist
            if _NO_BUCKET.search(str(error)):
                raise

    def files(self) -> dict[str, int]:
        """The sizes of the remote files, by name, without leases.

        Raises:
            DiskError: if the storage does not answer.
        """
        return {name: entry.size for name, entry in self._run_entries().items()}

    def _run_entries(self) -> dict[str, Entry]:
        """The remote files, without leases."""
        listing = self._entries()
        return {name: entry for name, entry in listing.items() if not name.startswith(f"{_LEASE}/")}

    def _entries(self, folder: str = "") -> dict[str, Entry]:
        """All objects of the run, or those below a folder of it."""
        from pyarrow import fs

        with self._storage_errors():
            system, path = self._location
            selector = fs.FileSelector(f"{path}/{folder}".rstrip("/"), recursive=True, allow_not_found=True)
            infos = [info for info in system.get_file_info(selector) if info.type == fs.FileType.File]
            entries = {i.path[len(path) + 1 :]: Entry(i.size, i.mtime.timestamp()) for i in infos}
        # Leave out the temporary file of a lease that is being written.
        return {name: entry for name, entry in entries.items() if not name.startswith(f"{_LEASE}/.")}

    @contextlib.contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, ImportError) as error:
            raise DiskError(self, self._reason(error), "cannot be read or written") from None

    def _reason(self, error: Exception) -> str:
        """An error of the storage as one line; common errors are reworded."""
        text = " ".join(str(error).split())
        bucket = (
            _scheme_and_rest(self.root)[1].partition("?")[0].strip("/").partition("/")[0].rpartition("@")[2]
        )
        if _NO_BUCKET.search(text):
            return f"there is no bucket {bucket!r}"
        if _FORBIDDEN.search(text):
            return f"these credentials have no permission for it in bucket {bucket!r} ({text[:200]})"
        if _UNREACHABLE.search(text):
            return f"the endpoint does not answer ({text[:200]})"
        return text[:300]

    def publish(self, folder: Path) -> None:
        """Make the remote directory equal to this folder.

        Only what has changed is uploaded. If an earlier checkpoint there has a file with the same contents,
        the storage copies it.

        Raises:
            DiskError: if that fails; the remote directory stays readable.
            Held: if another process considered this one dead and has resumed the run.
        """
        remote_sizes, old_stamps = (
            {name: entry.size for name, entry in self._entries().items()},
            _published_stamps(folder),
        )
        note = folder / _LEASE
        if note.is_file() and _is_lost(note.read_text(encoding="utf-8"), remote_sizes):
            raise Held(f"{self}: another process has resumed this run, because this one did not respond")
        for name in [name for name in remote_sizes if name.startswith(f"{_LEASE}/")]:
            del remote_sizes[name]
        visible = _run_files(folder)
        stamps = _file_stamps(visible)
        local_files = {name: visible[name] for name in stamps}
        changed = {
            name
            for name in local_files
            if remote_sizes.get(name) != stamps[name][0] or old_stamps.get(name) != stamps[name]
        }
        # A changed checkpoint is invalid until its manifest is written again.
        torn = {str(PurePosixPath(name).parent) for name in changed if not name.endswith(_WRITTEN_LAST)}
        changed |= local_files.keys() & {f"{parent}/{_WRITTEN_LAST[0]}" for parent in torn}
        obsolete = remote_sizes.keys() - local_files.keys()
        invalid = {name for name in remote_sizes if name in changed and name.endswith(_WRITTEN_LAST)} | (
            obsolete & {_WRITTEN_LAST[1]}
        )
        unchanged = {name: stamp for name, stamp in old_stamps.items() if name not in changed}
        # Before the first change: if publishing is interrupted, the old record must not be trusted next time.
        files.write(folder / _PUBLISHED, json.dumps(unchanged))
        by_digest = {
            stamp[2]: name for name, stamp in unchanged.items() if remote_sizes.get(name) == stamp[0]
        }
        with self._storage_errors():
            self._remove_all(invalid)
            for name in sorted(changed, key=_write_order):
                if local_files[name].is_file():  # a log may have been renamed
                    digest = stamps[name][2]
                    if not (digest in by_digest and digest and self._duplicate(by_digest[digest], name)):
                        self._copy(local_files[name], name)
            self._remove_all(obsolete - invalid)
        files.write(folder / _PUBLISHED, json.dumps(stamps))

    def _remove_all(self, names: Iterable[str]) -> None:
        """Remove remote files in an order in which no incomplete checkpoint ever appears complete."""
        for name in sorted(names, key=_write_order, reverse=True):
            self._remove(name)

    def _duplicate(self, old: str, name: str) -> bool:
        """Have the storage copy a file; return whether that succeeded."""
        system, path = self._location
        try:
            if system.type_name in ("local", "hdfs"):
                system.create_dir(f"{path}/{name}".rpartition("/")[0], recursive=True)
            system.copy_file(f"{path}/{old}", f"{path}/{name}")
        except (OSError, NotImplementedError):  # for example a file larger than S3 copies in one request
            return False
        return True

    def _copy(self, source: Path, name: str) -> None:
        with source.open("rb") as file:
            self._write(file, name)

    def _write(self, file: BinaryIO, name: str) -> None:
        system, path = self._location
        target = f"{path}/{name}"
        local = system.type_name in ("local", "hdfs")
        if local:  # this storage has folders, and readers would see partial files
            system.create_dir(target.rpartition("/")[0], recursive=True)
        part = f"{target.rpartition('/')[0]}/.{PurePosixPath(name).name}.part" if local else target
        with system.open_output_stream(part) as out:
            shutil.copyfileobj(file, out, 1 << 24)
        if local:
            system.move(part, target)

    def _remove(self, name: str) -> None:
        system, path = self._location
        system.delete_file(f"{path}/{name}")

    def fetch(self, folder: Path) -> None:
        """Make this folder equal to the remote directory, unless it is a staging folder that is not behind,
        or in which a process runs the run: such a folder may be behind until its next checkpoint.

        Raises:
            ConfigError: if there is no run.
            DiskError: if the storage does not answer.
            Held: if another process takes very long to fetch it.
        """
        remote_files = self._run_entries()
        if "config.yaml" not in remote_files:
            if (folder / "config.yaml").is_file():  # the folder was never published
                return
            raise not_a_run(self)
        if _is_current(folder, remote_files):
            return
        files.make(folder, parents=True)
        lock = FileLock(folder / ".lock")
        with files.boundary(folder / ".lock"):
            for _ in range(_PATIENCE):
                with contextlib.suppress(Timeout):
                    lock.acquire(timeout=_CHECK_INTERVAL)
                    break
                if (folder / _ROOT_FILE).is_file():  # whoever fetches writes it last
                    return
            else:
                raise Held(f"{folder}: another process is fetching this run; wait for it or stop it")
        try:
            if not _is_current(folder, remote_files):
                self._replace(folder, remote_files)
        finally:
            lock.release()

    def _replace(self, folder: Path, remote_files: dict[str, Entry]) -> None:
        """Replace the contents of a folder by these remote files; the caller must hold its lock."""
        files.remove(folder / _ROOT_FILE)  # first: from now on it is no staging folder
        for path in folder.iterdir():
            if path.name != ".lock":
                files.remove(path)
        fetched: dict[str, Entry] = {}
        for _ in range(_ATTEMPTS):  # until nothing has been published meanwhile
            complete = {n: entry for n, entry in remote_files.items() if _is_complete(n, remote_files)}
            if fetched == complete:
                break
            for name in fetched.keys() - complete.keys():
                (folder / name).unlink()
                del fetched[name]
                with contextlib.suppress(OSError):  # other files are left
                    (folder / name).parent.rmdir()
            for name, entry in complete.items():
                if fetched.get(name) != entry and self._download(name, folder):
                    fetched[name] = entry
            remote_files = self._run_entries()
        files.write(folder / _PUBLISHED, json.dumps(_file_stamps(_run_files(folder))))
        self.claim(folder)

    def _download(self, name: str, folder: Path) -> bool:
        """Copy an object into a folder; returns false if it does not exist any more.

        Raises:
            DiskError: if the storage does not answer, or the name leads out of the folder.
        """
        if ".." in PurePosixPath(name).parts:  # object names are not restricted to safe paths
            raise DiskError(self, f"{name!r} would be written outside of the run directory")
        target = folder / name
        files.make(target.parent, parents=True)
        system, path = self._location
        with self._storage_errors(), contextlib.suppress(FileNotFoundError):
            with system.open_input_stream(f"{path}/{name}") as file, target.open("wb") as out:
                shutil.copyfileobj(file, out, 1 << 24)
            return True
        return False

    @contextlib.contextmanager
    def leased(self, folder: Path, say: Callable[[str], None]) -> Iterator[None]:
        """Context manager: become the only process that writes to the run.

        Args:
            folder: its staging folder.
            say: called with a line if it takes a minute to find out whether another process is dead.

        Raises:
            Held: if there is another process, or if the remote run is ahead of this folder.
            DiskError: if the storage does not answer.
        """
        lease, end = f"{_LEASE}/{uuid.uuid4().hex}", threading.Event()
        self._write_lease(lease, folder)
        _own_leases.add(lease)
        thread = threading.Thread(
            target=self._keep_lease, args=(lease, folder, end), name="rayfl-lease", daemon=True
        )
        thread.start()
        try:
            self._outlast_others(lease, say)
            if _progress(set(_run_files(folder))) < _progress(set(self.files())):
                raise Held(f"{self}: has continued on another machine in the meantime; repeat the command")
            files.write(folder / _LEASE, lease)
            yield
        finally:
            end.set()
            thread.join()
            _own_leases.discard(lease)
            (folder / _LEASE).unlink(missing_ok=True)
            with contextlib.suppress(DiskError), self._storage_errors():
                self._remove(lease)

    def _write_lease(self, lease: str, folder: Path) -> bool:
        """Write a lease: its process, and the status of the run; return whether that is from this process."""
        record: dict[str, Any] = {
            "machine": machine_id(),
            "pid": os.getpid(),
            "born": process_start(os.getpid()),
        }
        with contextlib.suppress(OSError, ValueError):
            record["status"] = json.loads((folder / "status.json").read_text(encoding="utf-8"))
        with self._storage_errors():
            self._write(io.BytesIO(json.dumps(record).encode()), lease)
        status = record.get("status")
        return isinstance(status, dict) and status.get("pid") == os.getpid()

    def _keep_lease(self, lease: str, folder: Path, end: threading.Event) -> None:
        """Keep writing a lease until the end, unless another process has removed it."""
        has_status = False
        while not end.wait(_LEASE_INTERVAL if has_status else min(_LEASE_INTERVAL, _CHECK_INTERVAL)):
            with contextlib.suppress(DiskError):  # it may answer again
                if _is_lost(lease, self._entries(_LEASE)):
                    return
                has_status = self._write_lease(lease, folder)

    def _outlast_others(self, mine: str, say: Callable[[str], None]) -> None:
        """Wait until all other processes are known to be dead; on this machine that is known immediately.

        Raises:
            Held: if one is alive.
        """
        first_seen: dict[str, float] = {}
        started = time.monotonic()
        while True:
            entries = self._entries(_LEASE)
            if _is_lost(mine, entries):
                raise Held(f"{self}: another process wants to start this run; repeat the command")
            own_time = entries[mine].written
            others = {name: lease.written for name, lease in _leases(entries).items() if name != mine}
            for name, written in list(others.items()):
                record = self._read_json(name)
                holder = (
                    f"process {record.get('pid')} on {str(record.get('machine')).partition('/')[0]}"
                    if record
                    else "another process"
                )
                same_machine = record.get("machine") == machine_id()
                alive = same_machine and process_start(record.get("pid")) == record.get("born")
                alive &= record.get("pid") != os.getpid() or name in _own_leases
                if alive or first_seen.get(name, written) != written:
                    raise Held(f"{self}: {holder} is running this run; wait for it or stop it")
                if (
                    same_machine
                    or own_time - written > _DEAD_AFTER
                    or time.monotonic() - started > _DEAD_AFTER
                ):
                    self._take(name)
                    del others[name]
                elif name not in first_seen:
                    say(
                        f"{self}: waiting to see whether {holder} still runs this run "
                        f"(at most {_DEAD_AFTER:.0f} s)"
                    )
                first_seen[name] = written
            if not others:
                return
            time.sleep(_CHECK_INTERVAL)

    def _take(self, lease: str) -> None:
        """Remove the lease of a process that is considered dead.

        Raises:
            DiskError: if the storage does not answer.
        """
        with self._storage_errors():
            self._write(io.BytesIO(), _mark(lease))
            with contextlib.suppress(FileNotFoundError):
                self._remove(lease)

    def _read_json(self, name: str) -> dict[str, Any]:
        """The contents of a small JSON object; empty if it does not exist or is not a mapping.

        Raises:
            DiskError: if the storage does not answer.
        """
        for _ in range(_ATTEMPTS):
            text = self._read(name)
            if text is None:
                break
            with contextlib.suppress(ValueError):
                content = json.loads(text)
                return content if isinstance(content, dict) else {}
        return {}

    def _read(self, name: str) -> bytes | None:
        """The contents of an object; None if it does not exist.

        pyarrow asks for the size first: an object that is replaced by a longer one at this moment is cut.

        Raises:
            DiskError: if the storage does not answer.
        """
        system, path = self._location
        with (
            self._storage_errors(),
            contextlib.suppress(FileNotFoundError),
            system.open_input_stream(f"{path}/{name}") as file,
        ):
            return bytes(file.read())
        return None

    def glance(self, folder: Path) -> None:
        """Fetch the files that ``rayfl runs`` and ``rayfl top`` read: the run's config and status.

        Raises:
            DiskError: if the storage does not answer.
        """
        leases = _leases(self._entries(_LEASE))
        status = None
        for lease in sorted(leases, key=lambda name: leases[name].written):
            status = self._read_json(lease).get("status") or status
        file_names = ["config.yaml", *(() if status else ("summary.json", "rounds.csv"))]
        status = status or self._read_json("status.json")
        if status:
            (folder / "status.json").write_text(json.dumps(status), encoding="utf-8")
        from pyarrow import fs

        with self._storage_errors():
            system, path = self._location
            for info in system.get_file_info([f"{path}/{name}" for name in file_names]):
                if info.type == fs.FileType.File:
                    target = folder / info.base_name
                    with system.open_input_stream(info.path) as file:
                        target.write_bytes(file.read())
                    os.utime(target, (info.mtime.timestamp(), info.mtime.timestamp()))

    def remove(self) -> None:
        """Remove the remote directory."""
        with self._storage_errors():
            self._remove_all(self._entries())


def _mark(lease: str) -> str:
    """The mark of a lease that another process has removed."""
    return f"{_TAKEN}/{PurePosixPath(lease).name}"


def _is_lost(lease: str, names: Container[str]) -> bool:
    """Whether another process has removed a lease; its process may have written it again since."""
    return lease not in names or _mark(lease) in names


def _leases(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The leases that are held, without the marks of others."""
    held = {name for name in entries if not name.startswith(f"{_TAKEN}/") and not _is_lost(name, entries)}
    return {name: entries[name] for name in held}


_WRITTEN_LAST = ("manifest.json", "summary.json")


def _write_order(name: str) -> tuple[int, str]:
    """The order in which files are written; they are removed in the opposite order."""
    last = PurePosixPath(name).name
    return (_WRITTEN_LAST.index(last) + 1 if last in _WRITTEN_LAST else 0), name


def _run_files(folder: Path) -> dict[str, Path]:
    """The files of the run by name, without temporary files."""
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return {p.as_posix(): folder / p for p in paths if not any(part.startswith(".") for part in p.parts)}


def _file_stamps(files: Mapping[str, Path]) -> dict[str, list[Any]]:
    """Size and modification time of each file, to notice changes, and for files of checkpoints the SHA-256
    from their manifests."""
    digests: dict[str, str] = {}
    for name, path in files.items():
        if _checkpoint_folder(name) is not None and name.endswith(_WRITTEN_LAST[0]):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
                manifest_files = json.loads(path.read_text(encoding="utf-8"))["files"]
                parent = name.rpartition("/")[0]
                digests.update(
                    {
                        f"{parent}/{file_name}": str(file["sha256"])
                        for file_name, file in manifest_files.items()
                    }
                )
    stamps: dict[str, list[Any]] = {}
    for name, path in files.items():
        with contextlib.suppress(FileNotFoundError):  # a log may have been renamed
            stat = path.stat()
            stamps[name] = [stat.st_size, stat.st_mtime_ns, digests.get(name, "")]
    return stamps


def _published_stamps(folder: Path) -> dict[str, Any]:
    try:
        record = json.loads((folder / _PUBLISHED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(record, dict):
        return {}
    # Earlier versions wrote no SHA-256.
    return {name: stamp for name, stamp in record.items() if isinstance(stamp, list) and len(stamp) == 3}


def _checkpoint_folder(name: str) -> str | None:
    """The folder of the checkpoint to which a file belongs."""
    parts = PurePosixPath(name).parts
    return parts[1] if len(parts) > 2 and parts[0] == "checkpoints" and "round-" in parts[1] else None


def _is_complete(name: str, names: Container[str]) -> bool:
    """Whether a file does not belong to an incomplete checkpoint."""
    checkpoint = _checkpoint_folder(name)
    return checkpoint is None or f"checkpoints/{checkpoint}/{_WRITTEN_LAST[0]}" in names


def _is_current(folder: Path, remote_files: Iterable[str]) -> bool:
    """Whether a folder is a staging folder that is not behind these remote files."""
    return (folder / _ROOT_FILE).is_file() and _progress(set(_run_files(folder))) >= _progress(
        set(remote_files)
    )


def _progress(names: set[str]) -> tuple[int, bool]:
    """The progress of a run by its checkpoints, and whether it is finished."""
    rounds = [
        int(PurePosixPath(name).parts[1].removeprefix("round-").rstrip("~"))
        for name in names
        if name.endswith(_WRITTEN_LAST[0]) and (_checkpoint_folder(name) or "").startswith("round-")
    ]
    return max(rounds, default=-1), _WRITTEN_LAST[1] in names
