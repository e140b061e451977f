"""``baton bench serve``: load on any server with the OpenAI API, and how well it bore it.

1  workload   which prompts, how long, how long their answers, what they share
2  arrivals   when each request is due (open loop), or how many are under way at a time (closed loop)
3  generator  sends each when it is due, and notes when it really left
4  client     one request: what arrived when
5  figures    percentiles, goodput, the share of requests that met their targets
6  report     JSON, pictures, and one page that compares several runs
"""
