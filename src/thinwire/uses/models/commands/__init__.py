"""The part of ``pack`` and ``unpack`` that is of models, and a demo."""
