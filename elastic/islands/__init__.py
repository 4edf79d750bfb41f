"""An island's side of the sea: what it sends and fetches, adopts, waits for, and how it enters.

`holdfast.elastic.sea` has the arithmetic and the decisions. An island is an ordinary run; above
islands there is no process, only files in a store (`Islands.meet`):

| file | content |
|---|---|
| ``logbook/<number>.json`` | a record, created where there is none |
| ``works/<island>/<lineage>-<tide>-<portion>.json`` | the word of an island beside its payload |
| ``payloads/<island>/<digest>`` | the bytes of a work |
| ``alive/<island>.json`` | a sign of life, and the oldest tide that the island may still need |
| ``asked/<island>.json`` | a request for the sea's weights, of an island without a state |
| ``given/<request>`` | the answer, with the sea's weights as a checkpoint |
| ``weights`` | the weights at the end, as a checkpoint of the last island that left |
"""
