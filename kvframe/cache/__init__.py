"""The cache: pages and who owns them. Their bytes are in ``kvframe.attention.storage``.

Its files, in the order of the flow; each uses only those before it.

- When blocks die, and so which blocks a hit needs: ``live_range``.
- Where a request's blocks lie: ``block_table``; the groups by what they store: ``group_kinds``.
- Blocks: those that are free (``free_list``, ``slabs``), those that are evicted first (``eviction``), and all of them
  (``block_pool``).
- What is found: ``row_pages``, ``radix_tree`` and ``publisher`` for tokens, ``input_index`` for
  what comes beside them; ``stats``, ``prefix_lookup``, ``pins``.
- Who is told outside: ``keys``, ``events``.
- What must be true of all this: ``audit``; all this together: ``prefix_cache``.
- Running requests, as rows: ``rows``, ``arguments``; blocks that forks share: ``copy_on_write``; their blocks are
  allocated (``allocation``) and released (``dead_blocks``), and they begin and end (``coordinator``).
- Requests in host memory, and saved prefixes that are restored: ``swap``.
- What the engine uses: ``manager``.
"""
