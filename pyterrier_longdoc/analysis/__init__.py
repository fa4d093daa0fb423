"""What retrieval over long documents shows: relevance judgements, and where in a document relevance lies."""
