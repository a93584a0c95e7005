"""Before any test: programs that the tests start can be interrupted, also where make itself runs unattended.

A shell starts a job in the background with SIGINT ignored, and whoever that job starts inherits it.
"""

from __future__ import annotations

import gc
import math
import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from launchers import warm
from reported import THREE
from run_records import write_run
from texts import write_text

from thinwire.files.base import Folder
from thinwire.files.local_folder import PlainFolder, open_folder
from thinwire.runs.records.finished_runs import slug
from thinwire.runs.records.writer import COMPARE, write_json
from thinwire.state import log as logs

if TYPE_CHECKING:
    from hubs import Clock

    from thinwire.uses.following.push.publisher import Publisher

signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["TERM"] = "xterm"  # some CI has a dumb one; tests of that say so themselves
torch.set_num_threads(1)  # several processes share the cores: threads would wait for each other
with suppress(ImportError):  # where the tests inside Flower run
    from hypothesis import settings

    # One example may take long where others compute beside it: a test says by its own settings what it needs.
    settings.register_profile("beside others", deadline=None, max_examples=50)
    settings.load_profile("beside others")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what takes long first: at the end no worker is to have a long file of its own."""
    long = ("test_without_passes.py", "runs", "cli", "uses", "links")

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return long.index(folder) if folder in long else len(long)

    items.sort(key=place)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Let each of several workers import other files first: what one has compiled, the others need not."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    asked = [session.config.invocation_params.dir / a.partition("::")[0] for a in session.config.args]
    files = sorted({f for a in asked for f in (a.rglob("test_*.py") if a.is_dir() else [a])})
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for file in files[first:] + files[:first]:
        with suppress(Exception, pytest.skip.Exception):  # told when its turn comes
            import_module(".".join(file.relative_to(session.config.rootpath).with_suffix("").parts))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Fork the process that starts commands while this one has imported everything and runs nothing yet.

    What is imported stays: to look for garbage in it, again and again, would take longer than many a test.
    """
    gc.collect()
    gc.freeze()
    warm()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one worker, all that want the one emulated network to the same: others would wait."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "emulation" if "runs/emulator/" in file or "test_auto.py" in file else file

    return Files(config, log)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Begin each test with the same random numbers, whichever ran before it.

    They are others than those of the small seeds that tests give generators of their own.
    """
    torch.manual_seed(4242)
    np.random.seed(4242)
    random.seed(4242)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread, as ranks do: on a busy machine several wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def plain(tmp_path: Path) -> PlainFolder:
    """Return a store's folder on a disk."""
    return PlainFolder(tmp_path / "store")


@pytest.fixture
def folder(request: pytest.FixtureRequest, plain: PlainFolder, tmp_path: Path) -> Folder:
    """Return a store's folder; one in memory where a test asks for that, indirectly."""
    if getattr(request, "param", "plain") == "plain":
        return plain
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").store.clear()
    return open_folder(f"memory://{tmp_path.name}")


@pytest.fixture
def url() -> Iterator[str]:
    """Yield the URL of a store whose connections a test may break."""
    fsspec = pytest.importorskip("fsspec")
    from wired import Wired

    fsspec.register_implementation("wired", Wired, clobber=True)
    yield "wired://store"
    for kept in (Wired.store, Wired.outage, Wired.made):
        kept.clear()
    Wired.pseudo_dirs[:] = [""]


@pytest.fixture
def published() -> Iterator[tuple[Publisher, dict[str, torch.Tensor], str]]:
    """Yield a publisher in this process that has one version, its state and its address."""
    from commanded import weights

    from thinwire.uses.following.push.publisher import Publisher

    state = weights()
    with Publisher(state, name="policy") as publisher:
        publisher.publish(step=1)
        yield publisher, state, f"127.0.0.1:{publisher.port}"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return what hubs and spokes take for the time."""
    from hubs import Clock

    found = Clock()
    monkeypatch.setattr("thinwire.links.hub.station.ASLEEP", math.inf)  # a leap is no pause of this process
    for module in ("hub", "spoke", "station"):
        monkeypatch.setattr(f"thinwire.links.hub.{module}.monotonic", found)
    return found


@pytest.fixture
def arrays_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a log count the bytes of its arrays, which tests know to the byte, and not what is around them."""
    monkeypatch.setattr(logs, "OVERHEAD", 0)


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    """Return the folder of a comparison of three runs."""
    records = [write_run(tmp_path / slug(n), n, b, f) for n, b, f in THREE]
    write_json(tmp_path / COMPARE, [r.to_dict() for r in records])
    return tmp_path


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing of the user's cache be read or written."""
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a text to train on."""
    return write_text(tmp_path_factory.mktemp("data") / "text.txt")


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer with the vocabulary of ``tiny_models``."""
    from tiny_models import VOCAB

    from thinwire.runs.data.corpus import Corpus
    from thinwire.runs.data.documents import Document
    from thinwire.runs.models.tokenizer import trained_bpe

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THINWIRE_CACHE", str(tmp_path_factory.mktemp("tokenizer")))
        return trained_bpe(Corpus("t", (Document("some words to train on\n" * 20),), (), "test"), vocab=VOCAB)
