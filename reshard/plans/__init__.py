"""The plans room: from an Index and a Layout to a proven Plan.

Nouns: Target (the request to a format), Layout (the files of a checkpoint that does not exist yet), Plan (which source pieces feed which
target pieces), Fingerprint (a digest that no layout changes), RoundTrip (the proof that nothing is lost). Verb: prove.

A plan is data. This room reads no weight, writes no file and knows no format.
"""
