"""Each benchmark prints one JSON object as its last line; timings live here, never in tests."""
