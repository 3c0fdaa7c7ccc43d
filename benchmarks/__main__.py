"""``python -m benchmarks`` is ``python -m benchmarks.run``; with ``claims`` it prints published claims beside our figures."""

import sys

if sys.argv[1:2] == ["claims"]:
    from benchmarks.claims.page import main as print_claims

    raise SystemExit(print_claims(sys.argv[2:]))

from benchmarks.run import main

raise SystemExit(main())
