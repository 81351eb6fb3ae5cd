"""Pages: HTML documents of plans, reports and estimates. A value does not know how it is drawn; this room does, above the verbs."""
