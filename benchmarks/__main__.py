"""``python -m benchmarks`` is ``python -m benchmarks.run``; with ``claims`` it prints published claims beside our figures,
with ``published`` whole training runs.
"""

import sys

if sys.argv[1:2] == ["claims"]:
    from benchmarks.claims.page import main as print_claims

    raise SystemExit(print_claims(sys.argv[2:]))

if sys.argv[1:2] == ["published"]:
    from benchmarks.claims.published import main as print_runs

    raise SystemExit(print_runs(sys.argv[2:]))

from benchmarks.run import main

raise SystemExit(main())
