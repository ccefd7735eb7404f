"""Context parallelism: long sequences split over ranks, documents and all.

Bottom-up:

    split       which positions each rank holds
    masks       which keys a query sees, in words
    heads       attention by heads: all-to-all, whole sequences of some heads
    ring        attention by parts of the keys, merged by their log-sum-exp
"""
