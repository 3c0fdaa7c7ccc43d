"""Artifacts in, one HTML page out that holds everything it needs: charts, tables, style. No torch, no network."""
