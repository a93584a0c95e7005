"""A plugin of pytest (``-p without_passes``): thinwire as it is where nobody has a C compiler."""

from __future__ import annotations

import shutil

from thinwire import compiled

which = shutil.which
shutil.which = lambda name, *others, **more: None if name == "cc" else which(name, *others, **more)
compiled.functions = lambda folder, names: compiled.Passes()
