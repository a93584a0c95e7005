"""Local steps in Lightning's Trainer: a callback."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from thinwire.types import InputError, MissingExtra, require
from thinwire.uses.training.replicas.loop.hosted import Hosted, Peers, is_sharded

SAVED = "thinwire"  # the key in a checkpoint


def local_steps_lightning(recipe: str = "auto", *, peers: Peers | Callable[[], Peers], **options: Any) -> Any:
    """Return a callback by which Lightning's ``Trainer`` trains with those at other sites.

    It does what ``local_steps`` does, on any device; of several optimisers the last one counts the steps.
    Before each validation and checkpoint, and at the end, all replicas have the same bits. Arguments as for
    ``local_steps_callback``::

        peers = thinwire.meet("first.example.org:7400", rank, 2, token)
        shared = thinwire.local_steps_lightning(peers=peers)
        lightning.Trainer(max_steps=1000, callbacks=[shared]).fit(module, own_share_of_the_data)

    Errors: ``MissingExtra`` without Lightning 2; in ``fit`` those of ``local_steps``.
    """
    base = _callback()
    hosted = Hosted(recipe, peers, options)

    class LocalStepsLightning(base):  # type: ignore[misc, valid-type]
        """Made here, so that its base is imported only where it is used."""

        _state: Any = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            state, self._state = self._state, None
            text = f"training goes on from step {trainer.global_step}, and Lightning saves no state of"
            text += " this process's shards; begin anew with the weights alone"
            require(not (trainer.global_step and is_sharded(pl_module)), InputError, text)
            hosted.begin(pl_module, trainer.optimizers, state, trainer.world_size)

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            if hosted.begun:  # not in the check before a training
                hosted.drain(trainer.global_step)

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            if hosted.begun:
                saved = hosted.save(trainer.global_step)
                if hosted.training.rank >= 0:  # else another process exchanges for this one
                    checkpoint[SAVED] = saved
                checkpoint["state_dict"] = trainer.strategy.lightning_module_state_dict()  # behind the drain

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            self._state = checkpoint.get(SAVED)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            hosted.end(trainer.global_step)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            hosted.end()

    return LocalStepsLightning()


def _callback() -> type:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        with suppress(ImportError):
            found: type = import_module(name).Callback
            return found
    raise MissingExtra("Lightning's callback needs Lightning: pip install lightning")
