"""Documents as one HTML page that holds everything it needs: charts, tables, style. No torch, no network."""
