"""The names of ``kvframe_stores``, each under the module that defines it."""

from .page_records import PageRecords as PageRecords
from .page_writer import PageWriter as PageWriter
from .sealed_store import SealedStore as SealedStore
from .sealed_store import StoreCounts as StoreCounts
from .secret import choose_secret as choose_secret
from .weights import digest_weights as digest_weights
