"""Federated learning inside Flower: what clients and server send is compressed, what trains is the user's.

Needs the extra ``flower``. Nothing here imports flwr before it is used.

>>> from thinwire.uses.federated.flower.strategy import Compressed
>>> Compressed.__name__
'Compressed'
"""
