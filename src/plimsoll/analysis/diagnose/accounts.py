"""A profile in, its ledger out."""

from __future__ import annotations

from plimsoll.analysis.diagnose.device_book import DeviceBook
from plimsoll.analysis.diagnose.host_book import HostBook
from plimsoll.analysis.diagnose.labels import label_spans
from plimsoll.analysis.diagnose.ledger import Ledger
from plimsoll.analysis.diagnose.nesting import Nesting
from plimsoll.analysis.diagnose.profile import Profile
from plimsoll.artifacts.finding import WorkUnit


def keep_ledger(profile: Profile, unit: WorkUnit) -> Ledger:
    """The accounts of a profile.

    Args:
        profile: the trace.
        unit: kernels, or CPU ops: those of a trace with device activity as well.
    """
    nesting = Nesting(profile.host)
    labels = label_spans(nesting, profile)
    book = DeviceBook(profile, nesting, labels) if unit is WorkUnit.KERNELS else HostBook(profile, nesting, labels)
    return book.close()
