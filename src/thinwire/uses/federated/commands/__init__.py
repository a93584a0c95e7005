"""The commands ``federate``, ``federate-serve``, ``federate-join``, and a demo."""
