"""From files into running engines: the files that a plan would write for the ranks of an engine are streamed into their staging instead."""
