"""``thinwire generate`` and ``demo video`` with clips: records, animations, the report."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from launchers import sentence, warm

from thinwire.uses.kinds import load_run
from thinwire.uses.pictures.run.recording import png, quality
from thinwire.uses.pictures.run.video import wan_fashion
from thinwire.uses.pictures.run.video.clips import Clip, sample_clip

pytest.importorskip("diffusers")

FRAMES = 6
CLIP = ("--frames", str(FRAMES), "--canvas", "32x36", "--classes", "8", "--steps", "4", "--threads", "1")
MODEL = ("--model", "wan-fashion", "--init", "random")
WAYS = ("one", "fp16", "compact", "pipe-fp16", "batch")


def frames_of(data: bytes) -> int:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return int(getattr(image, "n_frames", 1)) if image.size == (36, 32) else 0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("clips")
    done = warm().run(place, "generate", *WAYS, *MODEL, *CLIP, "--pictures", "2", "--out", place / "out")
    assert done.code == 0, done.err
    return place / "out"


def test_each_way_leaves_a_record_with_frames_and_the_memory_of_its_ranks(made: Path) -> None:
    records: dict[str, Any] = {
        r["recipe"]["name"]: r for r in json.loads((made / "compare.json").read_text())
    }
    assert list(records) == list(WAYS)
    weights = sum(p.nbytes for p in wan_fashion.build(0).parameters())
    for name, r in records.items():
        assert (r["kind"], r["status"], r["frames"]) == ("pictures", "done", FRAMES)
        assert load_run(made / name).to_dict() == r
        memory = r["memory"]
        assert len(memory["peak_rss_bytes"]) == 2 and min(memory["peak_rss_bytes"]) > weights
        assert memory["device_bytes"] == [0, 0] and max(memory["weights_bytes"]) == weights
    one, fp16, compact, _, batch = records.values()
    assert one["quality"]["psnr_db"] is None and one["quality"]["flicker_db"] is None
    assert fp16["quality"]["flicker_db"] > compact["quality"]["flicker_db"] > 20
    assert compact["bytes"]["steady_step"] < fp16["bytes"]["steady_step"] / 4
    assert batch["quality"]["psnr_db"] is None
    for name in ("picture.png", "picture-2.png"):
        assert (made / "batch" / name).read_bytes() == (made / "one" / name).read_bytes()
    clip = Clip.parse(FRAMES, "32x36", "8")
    alone = clip.image(sample_clip(wan_fashion.build(0), clip, 4, seed=1))
    assert (made / "one" / "picture-2.png").read_bytes() == png(alone)


def test_clips_play_in_the_report_which_needs_no_other_file(made: Path) -> None:
    page = (made / "report.html").read_text()
    shown = [base64.b64decode(data) for data in re.findall(r"data:image/png;base64,([A-Za-z0-9+/=]+)", page)]
    assert sum(frames_of(data) == FRAMES for data in shown) >= len(WAYS) + 3  # clips, and some differences
    assert "2 clips of 6 frames, 32x36 pixels, by wan-fashion, 4 denoising steps" in page
    assert "http" not in page.partition("<main>")[2].partition("<a")[0] and "flicker" in page


def test_a_rank_of_a_pipe_has_its_blocks_alone_and_the_next_way_the_whole_model(tmp_path: Path) -> None:
    ways, out = ("compact-pipe", "one", "raw"), tmp_path / "out"
    done = warm().run(tmp_path, "generate", *ways, "--model", "wan-fashion", *CLIP, "--out", out, "--json")
    assert done.code == 0, done.err
    pipe, one, raw = (r["memory"]["weights_bytes"] for r in json.loads(done.out))
    block = sum(p.nbytes for p in wan_fashion.build(0).get_submodule("blocks.0").parameters())
    assert one == raw and pipe == [whole - 2 * block for whole in one]
    assert (json.loads(done.out)[2]["quality"]["psnr_db"] or 200) > 90


def test_what_is_still_does_not_flicker_and_what_moves_wrongly_does() -> None:
    reference = torch.rand(FRAMES, 32, 32, generator=torch.Generator().manual_seed(0)) * 0.8
    darker = quality(reference + 0.1, reference)
    assert darker["psnr_db"] == pytest.approx(20, abs=1e-3) and darker["flicker_db"] > 100  # type: ignore[operator]
    sign = 0.1 * (-1.0) ** torch.arange(FRAMES)[:, None, None]
    flickering = quality(reference.clamp(0.1) + sign, reference.clamp(0.1))
    assert flickering["psnr_db"] == pytest.approx(20, abs=1e-3)
    assert flickering["flicker_db"] == pytest.approx(20 - 20 * torch.tensor(2.0).log10().item(), abs=1e-3)
    assert "flicker_db" not in quality(reference[0], reference[0])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("demo", "video", "--frames", "7"), "--frames 7 is no clip; give an even number from 2 to 64"),
        (("demo", "video", "--canvas", "65x64"), "--canvas 65x64 is not made here; give multiples of 4"),
        (
            ("demo", "video", "--link", "fast"),
            "cannot read 'fast' in link 'fast'; write it like 100mbit,50ms",
        ),
        (("demo", "video", "--classes", "1,2,3,4"), "--classes names 4 garments for a clip; name 1 to 3"),
        (("generate", "one", "--frames", "8"), "--frames is for wan-fashion, and flux-fashion has none"),
    ],
)
def test_what_cannot_be_is_refused_before_anything(tmp_path: Path, asked: tuple[str, ...], said: str) -> None:
    command = warm().run(tmp_path, *asked, "--out", tmp_path / "out", "--quiet")
    assert command.code == 2 and said in sentence(command)
    assert not list(tmp_path.glob("out/*/run.json"))


def test_a_file_in_the_place_of_the_folder_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    command = warm().run(tmp_path, "demo", "video", "--out", tmp_path / "out")
    assert command.code == 2 and command.err.rstrip().endswith("out is a file; choose another --out")
    assert (tmp_path / "out").read_text() == "mine" and "Traceback" not in command.err
