# Counts Ethernet frames whose source is the MAC in argv[1], on all interfaces, until stdin ends.
import select, socket, sys

mac = bytes.fromhex(sys.argv[1].replace(":", ""))
sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
seen = total = 0
while True:
    ready, _, _ = select.select([sniffer, sys.stdin], [], [])
    if sniffer in ready:
        frame = sniffer.recv(65536)
        total += 1
        seen += frame[6:12] == mac
    elif sys.stdin in ready:
        break
print(total, "frames in all")
print(seen)
