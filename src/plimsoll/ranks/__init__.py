"""Several processes that train one model together: who they are, and how they tell each other what is not a tensor."""
