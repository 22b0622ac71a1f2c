"""Search over passages: corpora, BM25 and dense indexes, the servers and their client."""
