"""A profile in, its ledger out."""

from __future__ import annotations

from plimsoll.artifacts.finding import Unit
from plimsoll.diagnosis.device_book import DeviceBook
from plimsoll.diagnosis.host_book import HostBook
from plimsoll.diagnosis.labels import label_spans
from plimsoll.diagnosis.ledger import Ledger
from plimsoll.diagnosis.nesting import Nesting
from plimsoll.diagnosis.profile import Profile


def keep_ledger(profile: Profile, unit: Unit) -> Ledger:
    """The accounts of a profile.

    Args:
        profile: the trace.
        unit: kernels, or CPU ops: those of a trace with device activity as well.
    """
    nesting = Nesting(profile.host)
    labels = label_spans(nesting, profile)
    book = DeviceBook(profile, nesting, labels) if unit is Unit.KERNELS else HostBook(profile, nesting, labels)
    return book.close()
