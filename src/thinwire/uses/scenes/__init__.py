"""Scenes of 3D Gaussians: read, rendered, and packed small."""

from thinwire.uses.use import PACKAGES, Command, RunKind, Use

USE = Use(
    __name__,
    commands=(Command(".commands.view:view", PACKAGES),),
    kinds={"scene": RunKind(".run.record:SceneRecord", ".run.cards")},
    demos={"scenes": ".commands.demo:scenes"},
    registries=(".recipes:SCENES",),
    readers=(".about_packed_scene", ".about_scene"),
    layered=".state_form",
)
