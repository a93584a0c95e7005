"""Sample over machines: ComfyUI's sampler runs here, and workers make each call of the model with it."""

from __future__ import annotations

from typing import Any

KEY = "thinwire"  # of the wrapper
RECIPES = ("compact", "compact:bits=2", "fp16", "int8", "displaced", "ulysses", "compact-pipe", "pipe-fp16")


class ThinwireSample:
    """A model whose sampling runs over this machine and workers."""

    CATEGORY = "thinwire"
    FUNCTION = "spread"
    RETURN_TYPES = ("MODEL",)
    RETURN_NAMES = ("model",)
    DESCRIPTION = "Other machines, each with a running `thinwire worker`, help with every step of a sampler."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Return what ComfyUI shows on the node."""
        workers = {"default": "192.0.2.2:29600", "multiline": True, "tooltip": "Workers, one a line."}
        token = {"default": "", "tooltip": "File with the token of all machines; empty: THINWIRE_TOKEN."}
        name = {"default": "", "tooltip": "The model's file below --models of the workers."}
        return {
            "required": {
                "model": ("MODEL",),
                "workers": ("STRING", workers),
                "token_file": ("STRING", token),
                "recipe": (list(RECIPES), {"default": RECIPES[0]}),
                "model_name": ("STRING", name),
            },
            "optional": {
                "deadline": ("FLOAT", {"default": 60.0, "min": 1.0, "max": 3600.0, "step": 1.0}),
            },
        }

    def spread(
        self,
        model: Any,
        workers: str,
        token_file: str,
        recipe: str,
        model_name: str,
        deadline: float = 60.0,
    ) -> tuple[Any]:
        """Return the model with a wrapper around each run of a sampler.

        Errors: ``InputError``, one sentence, for what cannot be, before anything is sampled.
        """
        from comfy.patcher_extension import WrappersMP

        import thinwire
        from thinwire.uses.pictures.comfy_names.comfy_models import known_family
        from thinwire.uses.pictures.workers.over_workers import check_workers

        addresses = [line.strip() for line in workers.replace(",", "\n").splitlines() if line.strip()]
        token = thinwire.read_token(token_file.strip() or None)
        known_family(model.model.diffusion_model)
        check_workers(addresses, recipe, None, model_name.strip(), token)
        given = {"model": model_name.strip(), "token": token, "deadline": deadline, "source": "comfy"}

        def sample(executor: Any, guider: Any, *args: Any, **kwargs: Any) -> Any:
            own = guider.inner_model.diffusion_model  # by now on its device, its weights patched
            with thinwire.over_workers(own, addresses, recipe, **given):
                return executor(guider, *args, **kwargs)

        spread = model.clone()
        spread.remove_wrappers_with_key(WrappersMP.SAMPLER_SAMPLE, KEY)
        spread.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, KEY, sample)
        return (spread,)


NODE_CLASS_MAPPINGS = {"ThinwireSample": ThinwireSample}
NODE_DISPLAY_NAME_MAPPINGS = {"ThinwireSample": "Thinwire: sample over machines"}
