"""A folder in whatever fsspec reaches: object stores, SFTP, network shares, memory."""

from __future__ import annotations

import posixpath
from contextlib import suppress
from typing import Any
from uuid import uuid4

from thinwire.engines.sync.folder import PART, check_size, shown
from thinwire.types import InputError, MissingExtra, PayloadError

# Stores where one put makes a whole object or none. Elsewhere a file grows as it is written, so it is
# written under another name and moved.
ONE_PUT = {"memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "tos", "r2", "hf"}


class RemoteFolder:
    """Files under a URL, by fsspec; ``options`` go to its file system."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.where = shown(url)
        self._system, self._root = _open(url, self.where, options)
        protocol = self._system.protocol
        names = {protocol} if isinstance(protocol, str) else set(protocol)
        self._one_put = bool(names & ONE_PUT)

    def read(self, name: str, limit: int) -> bytes:
        path = self._path(name)
        try:
            size = self._system.size(path)
            if size is not None:
                check_size(size, limit, f"{self.where}/{name}")
            # One byte more than may be there: a file that has grown since is noticed, not taken in whole.
            data: bytes = self._system.cat_file(path, start=0, end=min(limit, size or limit) + 1)
        except (OSError, PayloadError):
            raise
        except Exception as e:  # each store has error classes of its own
            raise OSError(f"{self.where} cannot be read: {e}") from e
        check_size(len(data), limit, f"{self.where}/{name}")
        return data

    def write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        try:
            self._system.makedirs(posixpath.dirname(path), exist_ok=True)
            if self._one_put:
                self._system.pipe_file(path, data)
            else:
                self._move_in(path, data)
        except OSError:
            raise
        except Exception as e:
            raise OSError(f"{self.where} cannot be written: {e}") from e

    def _move_in(self, path: str, data: bytes) -> None:
        temporary = f"{path}.{uuid4().hex[:8]}{PART}"
        try:
            self._system.pipe_file(temporary, data)
            try:
                self._system.mv(temporary, path)
            except OSError:  # some servers rename onto no file that is there
                self._system.rm_file(path)
                self._system.mv(temporary, path)
        except BaseException:
            with suppress(Exception):
                self._system.rm_file(temporary)
            raise

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._system.rm_file(self._path(name))

    def names(self, folder: str) -> list[str]:
        self._system.invalidate_cache(self._path(folder))
        try:
            found = self._system.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        return [f"{folder}/{posixpath.basename(path)}" for path in found]

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def _open(url: str, where: str, options: dict[str, Any]) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError as e:
        raise MissingExtra(f"{where} needs fsspec: pip install 'thinwire[store]'") from e
    try:
        system, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
    except ImportError as e:  # fsspec's text names the package
        raise MissingExtra(f"{where} needs one more package: {e}") from e
    except Exception as e:
        raise InputError(f"cannot open the store {where} ({e}); check the URL and its options") from e
    return system, root.rstrip("/")
