"""The names of ``kvframe.routing``, each under the module that defines it."""

from .event_batch import EventBatch as EventBatch
from .event_batch import from_plain as from_plain
from .event_batch import to_plain as to_plain
from .prefix_index import ALL_MEDIA as ALL_MEDIA
from .prefix_index import PrefixIndex as PrefixIndex
