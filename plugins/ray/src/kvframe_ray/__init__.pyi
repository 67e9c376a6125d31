"""The names of ``kvframe_ray``, each under the module that defines it."""

from .deploying import app as app
