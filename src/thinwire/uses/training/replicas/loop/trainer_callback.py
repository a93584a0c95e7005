"""Local steps in a transformers Trainer: a callback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.types import InputError, MissingExtra, require
from thinwire.uses.training.replicas.loop.hosted import Hosted, Peers, is_sharded

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import TrainerCallback


def local_steps_callback(
    recipe: str = "auto", *, peers: Peers | Callable[[], Peers], **options: Any
) -> TrainerCallback:
    """Return a callback by which a ``Trainer`` trains with those at other sites, as ``local_steps`` does.

    - ``recipe`` and ``options``: as for ``local_steps``;
    - ``peers``: links of ``meet``, or a callable that makes them as the training begins.

    Before each evaluation and checkpoint, and at the end, all replicas have the same bits in their models. A
    checkpoint holds ``thinwire-RANK.safetensors`` too, and the Trainer resumes from it. Where ``accelerate
    launch`` has several processes at a site, the first one alone calls ``peers``, or with FSDP each one does.
    Each site gives its ``Trainer`` its own share of the data, and otherwise the same arguments::

        peers = thinwire.meet("first.example.org:7400", rank, 2, token)
        shared = thinwire.local_steps_callback(peers=peers)
        Trainer(model, args, train_dataset=data.shard(2, rank), callbacks=[shared]).train()

    Errors: ``MissingExtra`` without transformers; in ``train`` those of ``local_steps``.
    """
    try:
        from transformers import TrainerCallback as base
    except ImportError as e:
        raise MissingExtra("a Trainer callback needs transformers: pip install 'thinwire[lm]'") from e
    made: TrainerCallback = _made(base, Hosted(recipe, peers, options))
    return made


def _made(base: Any, hosted: Hosted) -> Any:
    """Return a callback of the class that only who has transformers can import."""

    class LocalStepsCallback(base):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            model = kwargs["model"]
            self._place = args.process_index if args.world_size > 1 and is_sharded(model) else None
            resumes = state.global_step and (args.process_index == 0 or self._place is not None)
            saved = _loaded(_checkpoint(args, state), state, self._place) if resumes else None
            hosted.begin(model, [kwargs["optimizer"]], saved, args.world_size)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if control.should_evaluate or control.should_save or control.should_training_stop:
                hosted.drain(state.global_step)

        on_epoch_end = on_step_end

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            from safetensors.torch import save_file

            saved, rank = hosted.save(state.global_step), hosted.training.rank
            if rank >= 0:  # else another process exchanges for this one
                save_file(saved, _checkpoint(args, state) / f"{_stem(rank, self._place)}.safetensors")

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            hosted.end(state.global_step)

        def close(self) -> None:
            """End a training that failed. Safe to call at any time."""
            hosted.end()

    return LocalStepsCallback()


def _stem(rank: int | str, place: int | None) -> str:
    return f"thinwire-{rank}" if place is None else f"thinwire-{rank}-{place}"


def _loaded(folder: Path, state: Any, place: int | None) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    stem = _stem("*", place)
    found = [f for f in folder.glob(f"{stem}.safetensors") if f.stem.count("-") == stem.count("-")]
    text = f"training goes on from step {state.global_step}, and {folder} has no state of this replica alone"
    require(len(found) == 1, InputError, f"{text}; begin anew, or resume from its own checkpoint")
    return load_file(found[0])


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
