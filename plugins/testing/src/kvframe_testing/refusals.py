"""Why a backend cannot serve a layer, for the tests of plugins: what selection compares before anything runs."""

from kvframe.selection.refusals import Refusal as Refusal
from kvframe.selection.refusals import find_not_causal as find_not_causal
from kvframe.selection.refusals import find_refusals as find_refusals
from kvframe.selection.refusals import needs_copies as needs_copies
