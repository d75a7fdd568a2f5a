"""A server in a few lines of the standard library, which does the mischief of its first argument."""

import json
import sys
import time

mischief = sys.argv[1]
TOOLS = {
    "none": [],
    "schema": [{"name": "one", "inputSchema": {"type": "object", "properties": {"a": {"type": "objekt"}}}}],
    "reference": [{"name": "one", "inputSchema": {"type": "object", "$ref": "http://127.0.0.1:9/schema"}}],
}
USUAL = [{"name": name, "inputSchema": {"type": "object"}} for name in ("one", "two")]

if mischief == "mute":
    time.sleep(3600)
if mischief == "broken":
    sys.exit("Traceback...\nModuleNotFoundError: No module named 'ink'")
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    answer = {"jsonrpc": "2.0", "id": asked["id"]}
    match asked["method"]:
        case "initialize":
            version = asked["params"]["protocolVersion"]
            server = {"name": "lines", "version": "1"}
            answer["result"] = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
        case "tools/list" if mischief == "endless":
            answer["result"] = {"tools": USUAL, "nextCursor": "on"}
        case "tools/list":
            answer["result"] = {"tools": TOOLS.get(mischief, USUAL)}
        case "tools/call" if mischief == "flood":
            while True:
                sys.stdout.write("not a message\n" * 1000)
        case "tools/call" if mischief == "line":
            while True:
                sys.stdout.write("x" * 65536)
        case "tools/call" if mischief == "die" and asked["params"]["name"] == "two":
            sys.exit(7)
        case "tools/call" if mischief == "hang" and asked["params"]["name"] == "two":
            time.sleep(3600)
        case "tools/call" if mischief == "image":
            image = {"type": "image", "data": "aGk=", "mimeType": "image/png"}
            answer["result"] = {"content": [{"type": "text", "text": "see"}, image]}
        case "tools/call":
            print("chatter")
            answer["result"] = {"content": [{"type": "text", "text": "done"}]}
        case _:
            answer["error"] = {"code": -32601, "message": "unknown"}
    print(json.dumps(answer), flush=True)
