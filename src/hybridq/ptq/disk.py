"""The one door to the disk: every open, delete, rename and folder of a conversion goes through it.

What is read may stand behind links (a snapshot of a hub is made of them), but must be a regular
file: a FIFO would be waited for without an end, a device have effects. What is written, deleted or
read back stands in a `Folder`, whose names are walked part by part from its open descriptor, and
none of whose parts may be a link: whoever can plant a link in the target must not choose what a
conversion writes or deletes. `tests/ptq/test_disk.py` holds that no other file opens paths.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Final

from ..errors import CheckpointError

__all__ = ["Folder", "is_name", "is_there", "kind_of", "names_in_folder", "partial_name", "reading"]

_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: What the system says of a link where none may be: as a file, as a folder.
_LINK: Final = {errno.ELOOP, errno.ENOTDIR, errno.EMLINK}
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def kind_of(path: Path) -> str:
    """Return "file", "folder" or "other" for what `path` leads to, "" if there is nothing.

    Raises:
        CheckpointError: the system cannot say, as for a name that is too long.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError) as error:
        raise _cannot("read", path, error) from error
    if stat.S_ISREG(mode):
        return "file"
    return "folder" if stat.S_ISDIR(mode) else "other"


def is_there(path: Path) -> bool:
    """Return whether `path` leads to something, as `kind_of` does."""
    return bool(kind_of(path))


def names_in_folder(folder: Path) -> list[str]:
    """Return the names in a folder, in order; none of one that nobody may look into."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


@contextmanager
def reading(path: Path) -> Iterator[int]:
    """Open a regular file for reading, behind links or not; give its descriptor.

    Raises:
        CheckpointError: it cannot be opened, or is no regular file.
    """
    if kind_of(path) == "other":
        raise _not_regular(path)  # before it is opened: to open a device may do something
    try:
        # Without waiting, should it have become a FIFO meanwhile.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise _cannot("read", path, error) from error
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise _not_regular(path)
        yield file
    finally:
        os.close(file)


def _not_regular(path: Path) -> CheckpointError:
    return CheckpointError(f"checkpoint: {path} must be a regular file")


def _cannot(what: str, path: Path, error: OSError | ValueError) -> CheckpointError:
    if isinstance(error, OSError):
        if error.errno in _FULL:
            return CheckpointError(
                f"checkpoint: no space left for {path} ({error.strerror}); what was finished is "
                "kept: make room and run again"
            )
        if error.errno == errno.ELOOP:
            return CheckpointError(
                f"checkpoint: cannot {what} {path}, which has a link on its way; nothing of a "
                "conversion may be one: remove it, or give another folder"
            )
    reason = error.strerror if isinstance(error, OSError) else error
    return CheckpointError(f"checkpoint: cannot {what} {path} ({reason})")


class Folder:
    """A folder whose files are opened, made and deleted without following a link.

    Names are relative, such as `"a.json"` or `"tokenizer/a.json"`.

    Args:
        path: of the folder; it may be a link itself, since the caller named it.

    Raises:
        CheckpointError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, _FOLDER)
        except (OSError, ValueError) as error:
            raise _cannot("open the folder", path, error) from error

    @classmethod
    def make(cls, path: Path) -> Folder:
        """Return the folder at `path`, made with those above it where they are not there.

        Raises:
            CheckpointError: it cannot be made.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise _cannot("make", path, error) from error
        return cls(path)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    @contextmanager
    def _within(self, name: str, what: str, makes: bool = False) -> Iterator[tuple[int, str]]:
        """Give the descriptor of the folder in which `name` stands, and its last part.

        Raises:
            CheckpointError: the name leads out, a part of it is a link, or the system refuses.
        """
        parts = PurePosixPath(name).parts
        if not is_name(name):
            raise CheckpointError(f"checkpoint: {self.path} cannot hold a file named {name!r}")
        at = os.dup(self._file)
        try:
            for part in parts[:-1]:
                if makes:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=at)
                below = self._enter(part, at)
                os.close(at)
                at = below
            yield at, parts[-1]
        except OSError as error:
            raise _cannot(what, self.path / name, error) from error
        finally:
            os.close(at)

    @staticmethod
    def _enter(part: str, at: int) -> int:
        try:
            return os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
        except OSError as error:
            # Of a link the system says that it is no folder.
            if error.errno in _LINK and stat.S_ISLNK(os.lstat(part, dir_fd=at).st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from error
            raise

    def has(self, name: str) -> bool:
        """Return whether something stands under `name`, be it a link.

        Raises:
            CheckpointError: a folder on the way to it is a link, or the system cannot say.
        """
        try:
            with self._within(name, "read") as (at, last):
                os.lstat(last, dir_fd=at)
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False
            raise
        return True

    @contextmanager
    def reading(self, name: str) -> Iterator[int]:
        """Open a regular file for reading; give its descriptor.

        Raises:
            CheckpointError: it cannot be opened, is a link, or no regular file.
        """
        with self._within(name, "read") as (at, last):
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.open(last, flags, dir_fd=at)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise _not_regular(self.path / name)
            yield file
        finally:
            os.close(file)

    @contextmanager
    def writing(self, name: str) -> Iterator[int]:
        """Open a file for writing that gets its name only once all of it is on the disk.

        What stood there is replaced, a link too, which is not followed. If the block raises,
        nothing is left; if the process dies, a file of another name (`partial_name`). Folders on
        the way are made.

        Raises:
            CheckpointError: the disk is full, or the file cannot be written.
        """
        partial = partial_name(name)
        with self._within(name, "write", makes=True) as (at, last):
            hidden = PurePosixPath(partial).name
            _unlink(hidden, at)  # what a run left, or somebody planted
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(hidden, flags, 0o666, dir_fd=at)
            try:
                yield file
                os.fsync(file)
                os.replace(hidden, last, src_dir_fd=at, dst_dir_fd=at)
                os.fsync(at)
            except BaseException:
                _unlink(hidden, at)
                raise
            finally:
                os.close(file)

    def delete(self, name: str) -> None:
        """Delete a file, or a link and not what it leads to; nothing where there is none.

        Raises:
            CheckpointError: a folder on the way to it is a link, or it cannot be deleted.
        """
        for own in (name, partial_name(name)):
            try:
                with self._within(own, "delete") as (at, last):
                    _unlink(last, at)
            except CheckpointError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise

    def names(self, below: str = "") -> list[str]:
        """Return the names in the folder, or in one below it, in order.

        Args:
            below: name of a folder; "": this one.

        Raises:
            CheckpointError: it is a link, or cannot be read.
        """
        if not below:
            return sorted(os.listdir(self._file))
        with self._within(f"{below}/.", "read") as (at, last):
            inner = self._enter(last, at)
            try:
                return sorted(os.listdir(inner))
            finally:
                os.close(inner)

    def delete_folder(self, name: str) -> None:
        """Delete a folder with the files in it, which holds no folders.

        Raises:
            CheckpointError: it is a link, or cannot be deleted.
        """
        for one in self.names(name):
            self.delete(f"{name}/{one}")
        with self._within(name, "delete") as (at, last):
            os.rmdir(last, dir_fd=at)

    def check_space(self, nbytes: int, what: str) -> None:
        """Raise CheckpointError unless the folder's disk has room for `nbytes` more.

        Args:
            nbytes: how many.
            what: what they are for.
        """
        found = os.statvfs(self._file)
        free = found.f_bavail * found.f_frsize
        if free < nbytes:
            raise CheckpointError(
                f"checkpoint: {what} needs {nbytes} bytes in {self.path}, which has {free} free"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process alone; the system lets it go when the process ends.

        Raises:
            CheckpointError: another process holds it.
        """
        file = os.open(".", _FOLDER, dir_fd=self._file)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CheckpointError(
                    f"checkpoint: another process is writing into {self.path}"
                ) from error
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):  # no locks on this disk
                    raise
            yield
        finally:
            os.close(file)


def is_name(name: str) -> bool:
    """Return whether a file of a folder, or of one below it, may have this name."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and ".." not in parts and "\0" not in name


def partial_name(name: str) -> str:
    """Return the name under which `name` is written until it is whole."""
    path = PurePosixPath(name)
    return str(path.parent / f".{path.name}.partial")


def _unlink(name: str, at: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=at)
