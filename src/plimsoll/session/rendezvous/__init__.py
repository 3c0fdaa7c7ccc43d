"""How the ranks that train one model find each other and agree."""
