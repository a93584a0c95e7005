"""Rollout hosts: engines that generate with a model which a trainer elsewhere goes on to train.

Nothing here imports a host before it is used.
"""
