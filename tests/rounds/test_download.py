"""Versions reach clients: bit for bit, in the fewest bytes, and bounded whatever comes."""

from __future__ import annotations

from random import Random

import pytest
import torch
from codec_examples import CODECS
from federation import Federation, same, taken
from torch import Tensor

from thinwire.codecs import Codec, Raw, TopK, Uniform
from thinwire.rounds.download import DeltaDownload, FullDownload, Lead, SharedSender
from thinwire.rounds.model_copy import ModelCopy
from thinwire.rounds.update_messages import Held, VersionForm, VersionMessage
from thinwire.types import InputError

SPARSE = TopK(0.02, Uniform(4, group=64))


def walk(values: int, steps: int) -> list[Tensor]:
    """Return weights that move as in training: some fast, most hardly."""
    draw = torch.Generator().manual_seed(0)
    speed = torch.randn(1, values, generator=draw).exp() * 0.01
    rows = [torch.randn(1, values, generator=draw)]
    for _ in range(steps):
        rows.append(rows[-1] + speed * torch.randn(1, values, generator=draw))
    return rows


def version(number: int, check: int, lead: Lead) -> VersionMessage:
    """Return a version as it comes over a wire."""
    return VersionMessage.unpack(VersionMessage(number, 1, 0, check, *lead, 1, 0.1, Raw()).pack())


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_all_copies_of_the_shared_model_are_the_servers(codec: Codec) -> None:
    draw, random = torch.Generator().manual_seed(3), Random(3)
    weights = torch.randn(1, 64, generator=draw)
    outlet = DeltaDownload(codec).open(weights)
    copies = [ModelCopy(64), ModelCopy(64, weights), ModelCopy(64), ModelCopy(64)]
    forms = set()
    for number in range(8):
        for i, copy in enumerate(copies):
            if i < 2 or random.random() < 0.4 or number == 7:  # the others miss versions
                form, packets = outlet.lead(copy.held)
                assert same(copy.take(version(number, outlet.check, (form, packets))), outlet.given)
                forms.add(form)
        weights = weights + 0.1 * torch.randn(1, 64, generator=draw)
        outlet.advance(weights)
    assert VersionForm.WHOLE in forms


def test_a_copy_that_was_kept_elsewhere_goes_on() -> None:
    outlet, rows = SharedSender(SPARSE, walk(500, 4)[0]), walk(500, 4)
    copy = ModelCopy(500)
    for number, row in enumerate(rows[1:], 1):
        outlet.advance(row)
        again = ModelCopy(500)  # as a process of its own for each version
        if copy.row is not None and copy.held is not None:
            again.hold(copy.row.clone(), copy.held.number)
        form, packets = outlet.lead(again.held)
        assert form is (VersionForm.MISSED if number > 1 else VersionForm.WHOLE)
        assert same(again.take(version(number, outlet.check, (form, packets))), outlet.given)
        copy = again


def test_whoever_missed_versions_gets_the_fewest_bytes() -> None:
    rows = walk(3000, 30)
    outlet = SharedSender(SPARSE, rows[0])
    late = {0: ModelCopy(3000, rows[0])}
    for number, row in enumerate(rows[1:], 1):
        outlet.advance(row)
        late[number] = ModelCopy(3000)
        late[number].take(version(number, outlet.check, outlet.lead(None)))
    again = SharedSender(SPARSE, rows[0])
    again.load_state_dict(outlet.state_dict(), rows[-1])
    forms = []
    for copy in late.values():
        form, packets = lead = outlet.lead(copy.held)
        assert again.lead(copy.held) == lead
        missed = sum(map(len, list(outlet._log)[copy.held.number :])) if copy.held else 0
        assert sum(map(len, packets)) <= missed
        assert same(copy.take(version(30, outlet.check, lead)), outlet.given)
        forms.append(form)
    assert forms[0] is VersionForm.PATCH and forms[-2:] == [VersionForm.MISSED, VersionForm.MISSED]
    assert outlet.lead(late[30].held) == (VersionForm.MISSED, ())  # it holds the newest
    assert outlet.lead(Held(29, 12345))[0] is VersionForm.WHOLE  # another version 29
    outlet.advance(rows[0])
    again.advance(rows[0])
    assert same(again.given, outlet.given) and again.check == outlet.check


def test_a_version_is_sent_as_it_is_or_not_at_all() -> None:
    outlet = FullDownload().open(walk(50, 0)[0])
    assert same(ModelCopy(50).take(version(0, outlet.check, outlet.lead(None))), walk(50, 0)[0])
    with pytest.raises(InputError, match="take Raw"):
        FullDownload(SPARSE)


def test_a_server_set_back_sends_all_to_a_client_that_is_ahead() -> None:
    federation = Federation(download=DeltaDownload(TopK(0.1, Uniform(4, group=16))))
    federation.round()
    state = federation.server.state_dict()
    federation.round()
    federation.round()
    client = federation.clients[1]
    federation.server.load_state_dict(state)
    federation.server.begin([0, 1])
    version = federation.server.issue(1, client.held, client.sequence)
    assert (version.form, version.sequence, version.confirmed) == (VersionForm.WHOLE, 4, 1)
    taken(federation.server.receive(1, client.train(version).pack()))
    held = federation.server.issue(0, None).held
    assert federation.server.issue(0, held).packets == ()  # it holds the newest


def test_the_log_of_messages_is_bounded_by_the_whole() -> None:
    draw = torch.Generator().manual_seed(0)
    outlet = SharedSender(TopK(0.02, Uniform(4)), torch.zeros(1, 3000))
    for _ in range(200):
        outlet.advance(torch.randn(1, 3000, generator=draw))
    assert 10 < outlet.kept < 100
    assert sum(x.nbytes for name, x in outlet.state_dict().items() if name.startswith("log.")) <= 12000
