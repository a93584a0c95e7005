"""The stage against torch's own: conformance for every schedule, and what only ours can do."""

import threading
from time import monotonic, sleep
from types import SimpleNamespace

import pytest
import torch
from toy import DIM, MICROBATCHES, RECIPES, ROWS, SEQ, VOCAB, Toy, batches, in_processes, joined

from thinwire.channels.disk import DiskStore
from thinwire.codecs import Uniform
from thinwire.links import Mailbox, loopback_pair
from thinwire.runs.ranks.telemetry import Telemetry
from thinwire.types import InputError, PayloadError
from thinwire.uses.training.pipeline.compressed_stage import CONTROL, CompressedStage
from thinwire.uses.training.pipeline.torch_stage import STAGES_VOTE, _blank

STEPS = 10


def conform(rank, world, port, schedule):
    """Train the same model with torch's stage and ours; evaluate in between; return losses and counters."""
    with joined(rank, world, port) as peers:
        stock = "1f1b" if schedule == "eager1f1b" else schedule  # ours has none of torch's own to match
        out = {"plain": Toy(rank, world, stock).train(STEPS)}
        for name, recipe in RECIPES.items():
            before = {p: peers[p].meter.snapshot() for p in peers}
            toy = Toy(rank, world, schedule, peers, recipe)
            out[name] = toy.train(STEPS)
            sent = {}
            _wait_until_sent(peers)
            for p in peers:
                for label, traffic in (peers[p].meter.snapshot() - before[p]).sent.items():
                    sent[label] = sent.get(label, 0) + traffic.nbytes
            tallies = [s.tally.take() for s in toy.stages]
            out[f"{name} bytes"] = [sent, [t.wire_bytes for t in tallies], [t.values for t in tallies]]
        beside = Toy(rank, world, schedule, peers, RECIPES["delta"], overlap=True)
        out["beside"] = beside.train(STEPS)
        for s in beside.stages:
            s.end()
        out["beside bytes"] = [s.tally.take().wire_bytes for s in beside.stages]
        ids = next(iter(batches(1)))
        plain, ours = Toy(rank, world, stock), Toy(rank, world, schedule, peers, RECIPES["delta"])
        out["eval plain"] = plain.step(ids, train=False)
        out["eval ours"] = ours.step(ids, train=False)
        mixed, straight = [], []
        for i in batches(6):
            mixed.append(ours.step(i))
            ours.step(ids, train=False)
        again = Toy(rank, world, schedule, peers, RECIPES["delta"])
        straight = [again.step(i) for i in batches(6)]
        out["undisturbed"] = [mixed, straight]
    return out


def _wait_until_sent(peers):
    """Wait for what is queued: sends do not block the schedule, and a meter counts what has left."""
    ends = monotonic() + 60
    while not all(p.reliable.idle for p in peers.values()) and monotonic() < ends:
        sleep(0.001)


@pytest.fixture(
    scope="module",
    params=[("gpipe", 2), ("1f1b", 2), ("interleaved1f1b", 2), ("1f1b", 4), ("eager1f1b", 4)],
    ids=str,
)
def trained(request):
    schedule, world = request.param
    return in_processes(world, conform, schedule)


def test_raw_is_bit_equal_to_the_stock_stage(trained):
    assert None not in trained[-1]["plain"]
    assert trained[-1]["raw"] == trained[-1]["plain"]
    assert trained[-1]["plain"][-1] < trained[-1]["plain"][0] - 0.02


@pytest.mark.parametrize("recipe", ["direct8", "delta", "step"])
def test_compressed_training_stays_close(trained, recipe):
    plain, ours = trained[-1]["plain"], trained[-1][recipe]
    # 1e-3 for the one boundary of two stages; four stages quantise three times on the way.
    boundaries = len([r for r in trained if r["raw bytes"][0].get("forward")])
    bound = (1e-3 if boundaries == 1 else 3e-3) if recipe == "direct8" else 2e-2
    assert ours != plain
    assert max(abs(a - b) for a, b in zip(plain, ours, strict=True)) < bound


def test_bytes_by_the_stage_are_the_meters(trained):
    for rank in trained:
        for recipe in RECIPES:
            sent, tallies, _ = rank[f"{recipe} bytes"]
            for way in ("forward", "backward"):
                assert sum(t[way] for t in tallies) == sent.get(way, 0)


def test_codecs_on_threads_of_their_own_change_nothing(trained):
    for rank in trained:
        assert rank["beside"] == rank["delta"]
        assert rank["beside bytes"] == rank["delta bytes"][1]


def test_compression_shows_on_the_wire(trained):
    for rank in trained:
        for way in ("forward", "backward"):
            raw, _, values = rank["raw bytes"]
            small = rank["direct8 bytes"][0]
            if way in raw:
                assert raw[way] >= 4 * sum(v[way] for v in values)
                assert small[way] < 0.55 * raw[way]  # these frames are tiny; headers weigh


def test_evaluation_is_uncompressed_and_disturbs_nothing(trained):
    last = trained[-1]
    assert last["eval ours"] == last["eval plain"]
    mixed, straight = last["undisturbed"]
    assert mixed == straight


def change_modes(rank, world, port):
    """Train and evaluate in turn, every stage's shapes known; tell of each message if it is of shapes."""
    hidden, ids = torch.empty(ROWS, SEQ, DIM, device="meta"), torch.empty(ROWS, SEQ, dtype=torch.int64)
    shapes = (
        {"input_args": ids.to("meta"), "output_args": hidden, "output_grads": hidden}
        if rank == 0
        else {
            "input_args": hidden.clone().requires_grad_(),
            "output_args": torch.empty(ROWS, SEQ, VOCAB, device="meta"),
            "input_grads": hidden,
        }
    )
    votes = []
    with joined(rank, world, port) as peers:
        mailbox = peers[1 - rank].mailbox
        send = mailbox.send
        mailbox.send = lambda tag, *args: votes.append(tag[:1] in b"VM") or send(tag, *args)
        toy = Toy(rank, world, "1f1b", peers, RECIPES["raw"], **shapes)
        for ids in batches(3):
            for training in (False, True):
                toy.step(ids, train=training)
    return votes


def test_shapes_are_settled_once_and_not_at_each_change_between_training_and_evaluation():
    for votes in in_processes(2, change_modes):
        assert sum(votes) == votes[0] == STAGES_VOTE and len(votes) > 6 - (not STAGES_VOTE)


class Coarse:
    """What a policy may choose: other codecs for a while."""

    def __init__(self, direct=False):
        self.codec, self.keyframe, self.direct = Uniform(2), Uniform(4), direct


def change_codecs(rank, world, port):
    """Let both senders change their codecs in mid-run; nobody else is told."""
    with joined(rank, world, port) as peers:
        toy = Toy(rank, world, "1f1b", peers, RECIPES["delta"])
        losses, bytes_ = [], []
        for i, ids in enumerate(batches(12)):
            choice = None if i < 4 else Coarse(direct=i >= 8)
            for way in ("forward", "backward"):
                toy.stages[0].follow(way, choice)
            losses.append(toy.step(ids))
            toy.stages[0].end()
            bytes_.append(sum(toy.stages[0].tally.take().wire_bytes.values()))
    return [losses, bytes_]


def test_a_sender_changes_its_codecs_between_two_packets():
    ranks = in_processes(2, change_codecs)
    losses = ranks[-1][0]
    assert losses[-1] < losses[0]
    for _, sent in ranks:
        assert max(sent[5:8]) < 0.9 * min(sent[1:4])  # 2 bits where the recipe has 4 and 8


def lose_references(rank, world, port):
    """Let a receiver forget its references in mid-run: a stage that came back without them."""
    with joined(rank, world, port) as peers:
        out = {}
        for name, forget in (("whole", False), ("lost", True)):
            toy = Toy(rank, world, "1f1b", peers, RECIPES["delta"])
            losses = []
            for i, ids in enumerate(batches(8)):
                if forget and i == 5 and rank == 1:
                    toy.stages[0]._in["forward"].receiver.reset()
                losses.append(toy.step(ids))
            out[name] = losses
    return out


def test_lost_references_are_asked_for_again_and_change_nothing():
    last = in_processes(2, lose_references)[-1]
    assert None not in last["lost"]
    assert last["lost"] == last["whole"]


def forget_ids(rank, world, port):
    with joined(rank, world, port) as peers:
        stage = Toy(rank, world, "gpipe", peers, RECIPES["delta"]).stages[0]
        assert isinstance(stage, CompressedStage)
        texts = []
        for call in (
            lambda: stage.begin(torch.arange(7), 4),
            lambda: stage._ids_of(0, 2),
            lambda: stage.begin([1, 2, 3, 3], 2),
            lambda: stage.begin([1, 2, 3, -3], 2),
            lambda: stage.begin([1, 2, 2, 1], 2, upcoming=[0.5]),
            lambda: Toy(rank, world, "gpipe", {}, RECIPES["delta"]),
            lambda: stage._send_all([SimpleNamespace(tensor=torch.tensor(1.0))], "forward", 0),
        ):
            try:
                stage.has_backward = True
                call()
            except InputError as e:
                texts.append(str(e))
    return texts


def test_missing_or_wrong_arguments_are_one_sentence():
    first = in_processes(2, forget_ids)[0]
    assert first[0].startswith("7 sample ids do not divide into 4 micro-batches")
    assert "call stage.begin(ids, n)" in first[1]
    assert first[2].startswith("2 rows need as many distinct sample ids, got [3, 3]")
    assert first[3].startswith("sample ids are numbers from 0 to 2**63 - 1, got -3 to 3")
    assert first[4].startswith("sample ids are whole numbers, got [0.5]")
    assert first[5].startswith("stage 0 needs rank 1, where stage 1 is, among its peers, which are []")
    assert first[6].startswith("stage 0 passes a single number; let it pass a row for each sample")


def close_twice(rank, world, port):
    """Train beside the compute, with references on disk, and close; return threads and what a store says."""
    with joined(rank, world, port) as peers:
        stores = []

        def store():
            stores.append(DiskStore())
            return stores[-1]

        toy = Toy(rank, world, "eager1f1b", peers, RECIPES["delta"], overlap=True, store=store)
        toy.train(2)
        own = [t.name for t in threading.enumerate()]
        for s in toy.stages:
            s.end()  # else a busy machine's last gradients may be dropped, and the other stage waits for them
        for s in (*toy.stages, *toy.stages):
            s.close()
        left = [t.name for t in threading.enumerate()]
        said = []
        for s in stores:
            try:
                s.put(1, (torch.zeros(1),))
            except InputError as e:
                said.append(str(e))
        return [own, left, len(stores), said]


def test_a_closed_stage_leaves_neither_threads_nor_references():
    for own, left, stores, said in in_processes(2, close_twice):
        assert {"encode", "decode"} <= {name.split()[0] for name in own}
        assert not [n for n in left if n.startswith(("encode", "decode", "references"))]
        assert len(said) == stores and all("closed" in text for text in said)


class Noting(DiskStore):
    """A store on disk that notes what it is told to read ahead."""

    def __init__(self):
        super().__init__()
        self.ahead = []

    def prefetch(self, keys):
        keys = list(keys)
        self.ahead.append(keys)
        super().prefetch(keys)


def announce_ids(rank, world, port):
    """Train with references on disk; tell the first stage alone what comes next; return what stores heard."""
    with joined(rank, world, port) as peers:
        stores = []

        def store():
            stores.append(Noting())
            return stores[-1]

        toy = Toy(rank, world, "gpipe", peers, RECIPES["delta"], store=store)
        ids = list(batches(3))
        for now, after in zip(ids, [*ids[1:], ()], strict=True):
            if rank == 0:
                toy.stages[0].begin(now, MICROBATCHES, after)
            x, y = (t[now] for t in toy.data)
            toy.schedule.step(x) if rank == 0 else toy.schedule.step(target=y, losses=[])
            toy.stages[0].end()
        heard = [s.ahead for s in stores]
        for s in toy.stages:
            s.close()
        return heard


def test_announced_ids_reach_the_stores_of_the_other_stage():
    wanted = [ids.tolist() for ids in batches(3)][1:]
    for heard in in_processes(2, announce_ids):
        assert heard and all(each == wanted for each in heard)


@pytest.fixture
def neighbour():
    """What a neighbour says, by mailboxes: ours and its."""
    a, b = (Mailbox(end) for end in loopback_pair())
    yield SimpleNamespace(mailbox=b, get=lambda tag, deadline, what, others=(): b.get(tag, deadline, what)), a
    a.close()
    b.close()


@pytest.mark.parametrize("said", [b"[" * 100_000, b"\xff", b"[[0]]", b"[[[1e99], [1], 0, 0]]"])
def test_shapes_that_cannot_be_read_are_a_payload_error(neighbour, said):
    ours, theirs = neighbour
    theirs.send(CONTROL.pack(b"M", b"f", 1), said)
    stage = CompressedStage.__new__(CompressedStage)
    stage.__dict__ |= {"stage_index": 1, "_deadline": 60.0, "_peers": {0: ours}, "rank_of": int}
    with pytest.raises(PayloadError, match="stage 0 sent something else than the shapes it passes"):
        stage._hear_shapes("forward", 0, _blank)


@pytest.mark.parametrize("said", [b"[" * 100_000, b"\xff", b""])
def test_a_report_that_cannot_be_read_is_a_payload_error(neighbour, said):
    ours, theirs = neighbour
    theirs.send(b"T", said)
    with pytest.raises(PayloadError, match="rank 0 sent something else than its report"):
        Telemetry(SimpleNamespace(peers={0: ours}), 60.0).get(0, b"T", "its report")
