"""Floor 3: requests, scheduling, sampling. Joins the cache with the model; knows no text."""
