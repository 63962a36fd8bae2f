# What the first process of a node does with its own mounts. Below /mnt is the directory of the node,
# whose parts stand at their usual places, so that every node looks like a machine of its own.
hostname "$NODE"
cd "$STATE"
mkdir -p bin run lib/branchpool lib/containerd lib/kubelet log
mount --bind "$PROGRAMS" bin
if [ ! -e branches.img ]; then
    truncate --size "$DISK" branches.img
    mkfs.btrfs --quiet branches.img
fi
# The loop device goes with the mount.
mount -o loop,noatime branches.img lib/branchpool
mount --rbind . /mnt
cd /
mount -t tmpfs -o mode=755 tmpfs /run
mount --rbind /mnt/lib /var/lib
mount --rbind /mnt/log /var/log
# What a Pod mounts with mountPropagation has to be shared.
mount --make-rshared /
echo 1 >/proc/sys/net/ipv4/ip_forward
# Answers of a Pod on the same bridge have to pass where Services are translated.
for switch in iptables ip6tables; do
    [ ! -e "/proc/sys/net/bridge/bridge-nf-call-$switch" ] || echo 1 >"/proc/sys/net/bridge/bridge-nf-call-$switch"
done
