#!/run/cocoon/busybox sh
# What busybox' udhcpc calls at each change of a lease. Installed by the guest agent.
bb=/run/cocoon/busybox

set_address() {
  now=$($bb ip -4 -o addr show dev "$interface" | $bb awk '{print $4}')
  [ "$now" = "$ip/$mask" ] && return
  $bb ip -4 addr flush dev "$interface"
  $bb ip addr add "$ip/$mask" ${broadcast:+broadcast "$broadcast"} dev "$interface"
}

set_routes() {
  for gateway in $router; do
    # A gateway outside the subnet is reached on the link itself.
    [ "$mask" != 32 ] || $bb ip route replace "$gateway" dev "$interface"
    $bb ip route replace default via "$gateway" dev "$interface"
    break
  done
}

set_dns() {
  [ -n "$dns" ] || return
  { [ -z "$domain" ] || echo "search $domain"; for server in $dns; do echo "nameserver $server"; done; } \
    >/etc/.resolv.conf.cocoon && $bb mv -f /etc/.resolv.conf.cocoon /etc/resolv.conf
}

case "$1" in
  deconfig) $bb ip -4 addr flush dev "$interface"; $bb ip link set "$interface" up ;;
  bound | renew)
    [ -z "$mtu" ] || $bb ip link set "$interface" mtu "$mtu"
    set_address; set_routes; set_dns ;;
esac
exit 0
