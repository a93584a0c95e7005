"""What this machine and the link to another can do, and what to change."""

from thinwire.uses.use import LOOKING, Command, Use

USE = Use(__name__, commands=(Command(".commands.doctor:doctor", LOOKING),))
