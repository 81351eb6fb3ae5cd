"""Pictures: pages of HTML and drawings of SVG from plain values. Nothing is fetched, nothing runs, and names are hostile text."""
