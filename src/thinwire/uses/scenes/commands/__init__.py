"""The command ``view``, the part of ``pack`` and ``unpack`` that is of scenes, and a demo."""
