"""Serving: a running batch that requests join and leave (`engine`, `scheduler`), OpenAI's API around it (`api`, `app`), and a page."""
