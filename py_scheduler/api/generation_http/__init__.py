"""The generation gateway for clients that speak OpenAI's API: an episode's conversation over HTTP.

    request with an episode's key -> chat (what is asked) -> conversation (what is new in it) -> the episode itself

Whatever comes in here is observed and generated through the episode, so it is recorded like everything else.
"""

from py_scheduler.api.generation_http.server import GenerationHttp as GenerationHttp
